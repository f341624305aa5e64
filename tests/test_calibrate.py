"""`memfit calibrate` on this processor, and the rows that it writes."""

import time
import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memfit import api, units
from memfit.catalog import find_device
from memfit.catalog.overheads import find_overhead
from memfit.catalog.own import as_toml, own_file, put_row
from memfit.errors import InvalidRequest
from memfit.hardware import Curve
from memfit.train import calibrate as measuring
from memfit.train.attention import BACKENDS
from memfit.train.machine import measure_machine


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "memfit"


def test_this_processor_is_measured_and_predictions_rest_on_it(home):
    assert api.find_device("cpu").basis == "the vendor's sheet"
    home.mkdir()
    (home / "devices.toml").write_text('# mine\n[my-box]\nlike = "rtx-4090"  # kept\n')
    made = api.calibrate("cpu", quick=True)
    assert made == find_device("cpu-x86")
    text = (home / "devices.toml").read_text()
    assert text.startswith('# mine\n[my-box]\nlike = "rtx-4090"  # kept\n')
    for dtype in ("fp32", "bf16"):
        curve = made.curve("matmul", dtype)
        assert [size for size, _ in curve.points] == sorted(size for size, _ in curve.points)
        assert made.flops[dtype] == pytest.approx(curve.best, rel=1e-5)
        assert made.curve("attention", dtype, "flash").best > 1e8
        assert made.curve("attention", dtype, "efficient") is None  # a CPU has no such kernel
    assert 1e-7 < made.calibration.launch_seconds < 1e-3
    assert made.calibration.versions["torch"] == torch.__version__
    assert made.calibration.context is None
    assert made.basis == f"your own measurement of {made.calibration.date}"
    plan = api.plan(api.read("gpt2", device="cpu", changes={"task.global_batch": 1}))
    assert plan.time.step_seconds > 0
    assert plan.time.basis == made.basis
    assert made.basis in plan.time.because
    api.calibrate("cpu", quick=True)
    assert (home / "devices.toml").read_text().count("[cpu-x86]") == 1
    assert find_device("my-box").flops == find_device("rtx-4090").flops


def test_its_figures_are_those_of_a_second_way_of_measuring(home):
    """Within a factor of 3: other work may share this machine's cores."""
    made = api.calibrate("cpu", quick=True)
    again = measure_machine(find_device("cpu-x86"))
    assert again.basis.startswith("your own measurement")
    assert 1 / 3 < made.flops["fp32"] / again.flops["fp32"] < 3
    a = torch.randn(512, 512)
    start = time.perf_counter()
    for _ in range(20):
        a @ a
    rate = 20 * 2 * 512**3 / (time.perf_counter() - start)
    assert 1 / 3 < dict(made.curve("matmul", "fp32").points)[round(2 * 512**3, -3)] / rate < 3


def test_a_row_of_ones_own_leaves_the_catalogues_alone(home):
    made = api.calibrate("cpu", row="my-box", quick=True)
    assert (made.id, made.vendor) == ("my-box", "CPU")
    assert find_device("cpu-x86").calibration is None
    for wrong in ("My Box", "a.b", "[x]"):
        with pytest.raises(InvalidRequest, match="cannot be a device's id"):
            api.calibrate("cpu", row=wrong, quick=True)


def test_what_is_not_here_is_refused(home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidRequest, match="no device `cuda:3`"):
        api.calibrate("cuda:3")
    with pytest.raises(InvalidRequest, match="`tpu` cannot be calibrated"):
        api.calibrate("tpu")


def test_a_wrong_file_is_told_of_before_anything_is_measured(home, monkeypatch):
    def never(*_, **__):
        raise AssertionError("measured")

    monkeypatch.setattr(measuring, "measure", never)
    home.mkdir()
    (home / "devices.toml").write_text("[cpu-x86\n")
    with pytest.raises(InvalidRequest, match=r"devices\.toml` is not TOML"):
        api.calibrate("cpu")


def test_attention_counts_the_half_of_its_products_that_causality_leaves():
    shape = (2, 3, 64, 16)
    with sdpa_kernel(BACKENDS["math"]), FlopCounterMode(display=False) as counted:
        measuring._attend(shape, torch.float32, torch.device("cpu"))()
    assert counted.get_total_flops() == 2 * measuring._count(shape)


def test_a_measured_context_replaces_the_published_band(home):
    home.mkdir()
    (home / "devices.toml").write_text(
        '[h100-sxm]\ncalibration = { date = "2026-11-20", versions = {}, context = "700 MiB" }\n'
    )
    found = find_overhead(find_device("h100-sxm"))
    assert (found.low, found.typical, found.high) == (700 * units.MIB,) * 3
    assert "your own measurement of 2026-11-20" in found.because
    assert find_overhead(find_device("h200-sxm")).low < 700 * units.MIB


plain = st.recursive(
    st.integers(-(10**9), 10**9) | st.text(max_size=9) | st.booleans() | st.floats(1e-9, 1e15),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc-é. ", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_what_is_written_reads_back(value):
    assert tomllib.loads(f"x = {as_toml(value)}") == {"x": value}


def test_other_rows_and_comments_stay_when_one_is_written(home):
    home.mkdir()
    first = '# a\n[one]\nx = 1\n\n["two"]\ny = 2\n[two.more]\nz = 3\n[three]\n'
    (home / "devices.toml").write_text(first)
    put_row("devices.toml", "two", {"y": 5})
    text = own_file("devices.toml").read_text()
    assert text == "# a\n[one]\nx = 1\n\n[three]\n\n[two]\ny = 5\n"
    (home / "devices.toml").write_text("[two]\ny = [\n[1],\n]\n")
    with pytest.raises(InvalidRequest, match="cannot be replaced"):
        put_row("devices.toml", "two", {"y": 5})


def test_the_best_of_a_curve_is_its_highest_rate():
    curve = Curve(work="matmul", dtype="bf16", points=((1.0, 5.0), (2.0, 9.0), (3.0, 8.0)))
    assert curve.best == 9.0


@pytest.mark.slow
def test_all_reduce_among_processes():
    from memfit.train.collective_rates import measure_all_reduce

    (curve,) = measure_all_reduce("gloo", 2, [1 << 16, 1 << 20])
    assert [size for size, _ in curve.points] == [1 << 16, 1 << 20]
    assert all(1e6 < rate < 1e12 for _, rate in curve.points)
