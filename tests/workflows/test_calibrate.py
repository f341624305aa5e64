"""`memfit calibrate` on this processor, and the rows that it writes."""

import time
import tomllib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.nn.attention import sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memfit import api
from memfit.catalog import find_device
from memfit.catalog.overheads import find_overhead
from memfit.catalog.own import as_toml, own_file, put_row
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.records.hardware import Calibration, Curve
from memfit.train.measure import calibrate as measuring
from memfit.train.model.attention import BACKENDS


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "memfit"


def test_this_processor_is_measured_and_predictions_rest_on_it(home, monkeypatch):
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
    plan = api.plan(api.read("gpt2", device="cpu", changes={"task.global_batch": 1}), levers=False)
    assert plan.time.step_seconds > 0
    assert plan.time.basis == made.basis
    assert made.basis in plan.time.because
    a, seconds = torch.randn(512, 512), []
    for _ in range(100):  # the best of many calls is a ceiling, however busy the machine is
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    assert made.curve("matmul", "fp32").points[1][1] < 1.5 * 2 * 512**3 / min(seconds)
    again = measuring.Measured(made.curves, made.calibration)
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: again)
    api.calibrate("cpu", quick=True)
    assert (home / "devices.toml").read_text().count("[cpu-x86]") == 1
    assert find_device("my-box").flops == find_device("rtx-4090").flops


def test_rates_are_size_over_the_median_repeat(monkeypatch):
    """By a clock that says 1 ms a call, and 3 ms in each repeat's worst: nothing else is timed."""
    calls = []

    def clock(_work, _device, count):
        calls.append(count)
        return count * (3e-3 if len(calls) % 7 == 0 else 1e-3)

    monkeypatch.setattr(measuring, "_timed", clock)
    found = measuring.measure(torch.device("cpu"), quick=True)
    curves = {(c.work, c.dtype, c.kernel): c for c in found.curves}
    assert curves["matmul", "fp32", ""].points == (
        (2 * 128**3, pytest.approx(2e3 * 128**3)),
        (2 * 512**3, pytest.approx(2e3 * 512**3)),
        (2 * 1024**3, pytest.approx(2e3 * 1024**3)),
    )
    flop = 6 * measuring.HEADS * 256**2 * measuring.HEAD_DIM
    assert curves["attention", "bf16", "flash"].points[1] == (flop, pytest.approx(flop * 1e3))
    nbytes = 2 * 32 * units.MIB  # read and written
    assert curves["memory", "", ""].points[1] == (nbytes, pytest.approx(nbytes * 1e3))
    assert max(c.spread for c in found.curves) == pytest.approx(2)
    assert found.calibration.launch_seconds == pytest.approx(1e-3)


@pytest.fixture
def gpu(home, monkeypatch):
    """A GPU that was measured, as the driver would describe it; `name` names it."""
    properties = SimpleNamespace(
        name="", major=9, minor=0, total_memory=80 * units.GIB, multi_processor_count=132
    )
    found = measuring.Measured(
        curves=(
            Curve(work="matmul", dtype="bf16", points=((1e9, 1e14), (1e12, 7e14)), spread=0.01),
            Curve(work="memory", points=((1e6, 1e12), (1e9, 3e12))),
        ),
        calibration=Calibration(
            date="2026-11-20", versions={"driver": "580"}, launch_seconds=4e-6, context=600 << 20
        ),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: found)

    def name(text):
        properties.name = text

    return name


def test_a_row_of_ones_own_leaves_the_catalogues_alone(gpu):
    made = api.calibrate("cpu", row="my-box", quick=True)
    assert (made.id, made.vendor) == ("my-box", "CPU")
    assert find_device("cpu-x86").calibration is None
    for wrong in ("My Box", "a.b", "[x]"):
        with pytest.raises(InvalidRequest, match="cannot be a device's id"):
            api.calibrate("cpu", row=wrong, quick=True)


def test_a_known_gpu_keeps_its_data_sheet_beside_what_it_reached(gpu):
    sheet = find_device("h100-sxm")
    gpu("NVIDIA H100 80GB HBM3")
    made = api.calibrate("cuda")
    assert made.id == "h100-sxm"
    assert (made.flops, made.bandwidth, made.memory) == (sheet.flops, sheet.bandwidth, sheet.memory)
    assert made.flops_measured["bf16"] == 7e14
    assert made.flops_measured["fp8"] == sheet.flops_measured["fp8"]
    assert made.curve("matmul", "bf16").points == ((1e9, 1e14), (1e12, 7e14))
    assert (made.calibration.launch_seconds, made.calibration.context) == (4e-6, 600 << 20)
    assert made.calibration.versions == {"driver": "580"}
    assert made.basis == "your own measurement of 2026-11-20"
    products = replace(made, curves=tuple(c for c in made.curves if c.work == "matmul"))
    assert products.basis.endswith("its bandwidth by the vendor's sheet")


def test_what_a_gpu_was_seen_to_reach_decides_its_predicted_time(gpu):
    gpu("NVIDIA H100 80GB HBM3")
    asked = api.read("llama-3.2-1b", device="h100-sxm", changes={"task.global_batch": 4})
    before = api.plan(asked, levers=False).time
    api.calibrate("cuda")  # 700 TFLOP/s, where the published ceiling is 794.5
    after = api.plan(asked, levers=False).time
    assert 1.02 < after.step_seconds / before.step_seconds < 794.5 / 700
    assert "published measurements" in before.because
    assert "your own measurement" in after.because


def test_a_gpu_that_the_catalogue_lacks_gets_a_row_of_its_own(gpu):
    gpu("NVIDIA Imaginary 9000")
    made = api.calibrate("cuda")
    assert made.id == "my-nvidia-imaginary-9000"
    assert find_device("NVIDIA Imaginary 9000") == made  # as `device: auto` asks for it
    assert (made.memory, made.multiprocessors) == (80 * units.GIB, 132)
    assert made.flops == made.flops_measured == {"bf16": 7e14}  # no sheet: what was measured
    assert made.bandwidth == 3e12
    assert made.capability == (9, 0)
    assert made in api.devices()
    plan = api.plan(
        api.read("gpt2", device=made.id, changes={"task.global_batch": 1}), levers=False
    )
    assert plan.memory.usable == 80 * units.GIB
    assert plan.time.step_seconds > 0
    assert "your own measurement of 2026-11-20" in plan.time.because


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
    from memfit.train.distributed.collective_rates import measure_all_reduce

    (curve,) = measure_all_reduce("gloo", 2, [1 << 16, 1 << 20])
    assert [size for size, _ in curve.points] == [1 << 16, 1 << 20]
    assert all(1e6 < rate < 1e12 for _, rate in curve.points)
