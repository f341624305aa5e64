"""What is measured of this machine's processor before a run."""

import pytest

from memfit.train.run import machine


def on(rate, waits, monkeypatch):
    """The rate measured where a product waits so long for other processes, and the sides."""
    sides = []

    def take(work):
        sides.append(work.args[0].shape[0])
        return waits + 2 * sides[-1] ** 3 / rate

    monkeypatch.setattr(machine, "_seconds", take)
    return machine._matmul(machine.torch.float32), sides


@pytest.mark.parametrize("waits", [0.016, 0.06])
def test_a_product_that_waits_for_other_processes_is_no_measure_of_the_processor(
    waits, monkeypatch
):
    """Eight times the work then takes about as long: the smallest would say a thousandth."""
    found, sides = on(100e9, waits, monkeypatch)
    assert sides == [128, 256, 512, 1024, 2048]
    assert found == pytest.approx(100e9, rel=0.3)


def test_where_nothing_waits_no_product_is_larger_than_it_must_be(monkeypatch):
    found, sides = on(100e9, 0.0, monkeypatch)
    assert (found, sides[-1]) == (pytest.approx(100e9), 1024)
    # bf16 on a processor that has none of its own
    found, sides = on(0.7e9, 0.0, monkeypatch)
    assert (found, sides[-1]) == (pytest.approx(0.7e9), 512)


def test_the_least_of_some_calls_counts(monkeypatch):
    moments = iter([0.0, 3.0, 10.0, 11.0, 20.0, 25.0, 30.0, 32.0, 40.0, 49.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(moments))
    assert machine._seconds(lambda: None) == 1.0
