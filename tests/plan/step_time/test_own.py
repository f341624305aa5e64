"""The user's own curves: each changes the spans that rest on it, and no other; faster never slows.

The device is a made-up calibration of an H100: figures nobody measured.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit import api
from memfit.catalog import find_device
from memfit.families import read_model
from memfit.plan.step_time.communication.collectives import Group, bus_factor, collective_seconds
from memfit.plan.step_time.own import AROUND, Own, describe, rate_at, read_own, scale_links
from memfit.plan.step_time.read import read_setting
from memfit.plan.step_time.step import predict_step
from memfit.records import from_data
from memfit.records.hardware import Calibration, Curve
from memfit.records.request import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from on_gpu.rows import LANDED, read_rows

POINTS = ((1e9, 5e13), (1e11, 4e14), (1e13, 7e14))
CURVES = {
    "products": Curve(work="matmul", dtype="bf16", points=POINTS),
    "attention": Curve(work="attention", dtype="bf16", kernel="flash", points=POINTS),
    "memory": Curve(work="memory", points=((1e6, 9e12), (1e9, 2e12))),
    "reduced": Curve(work="all_reduce", points=((1e6, 1e10), (1e9, 2e11))),
}
# what a step's parts rest on; `launch` has no curve
SPANS = {
    "products": {"forward", "backward", "head", "repeated", "waiting"},
    "attention": {"forward", "backward", "repeated", "waiting"},
    "memory": {"forward", "backward", "head", "repeated", "waiting", "updating"},
    "reduced": {"gathering"},
    "launch": {"waiting"},
}


def plan(**changes):
    asked = {
        "model": "qwen2.5-0.5b", "micro_batch": 1, "recompute": "full",
        "task": {"sequence_length": 1024, "global_batch": 8}, "method": "full",
        "hardware": {"device": "h100-sxm", "count": 8},
        "parallel": {"dp_shard": 8}, "attention": "flash",
    } | changes  # fmt: skip
    return from_data(asked, Request, source="the test")


RECIPE = api.predict(plan(framework="torchtitan")).recipe
OWN = replace(RECIPE, framework="memfit", attention="flash")
MODEL = read_model(OWN.model)


def calibrated(*curves, launch=None):
    made = Calibration(date="2026-11-20", versions={}, devices=8, launch_seconds=launch)
    return replace(find_device("h100-sxm"), curves=curves, calibration=made)


def read(device, kernel="flash", own_step=True):
    return read_own(device, "bf16", "bf16", kernel, own_step=own_step)


def parts(device, recipe=OWN):
    return predict_step(read_setting(recipe, MODEL, device))._asdict()


@pytest.mark.parametrize("what", SPANS)
def test_a_curve_changes_the_spans_that_rest_on_it_and_no_other(what):
    usual, curves = parts(calibrated()), [CURVES[what]] if what in CURVES else []
    found = parts(calibrated(*curves, launch=1e-3 if what == "launch" else None))
    changed = {n for n in usual if found[n] != pytest.approx(usual[n], rel=1e-9, abs=1e-12)}
    # straggling is a share of all the others; gathering is what computing does not cover
    assert changed - {"straggling", "gathering"} == SPANS[what] - {"gathering"}
    assert "gathering" not in SPANS[what] or "gathering" in changed


def test_only_a_calibrated_row_has_curves_of_its_own():
    listed = replace(find_device("a100-sxm-80gb"), curves=tuple(CURVES.values()))
    assert read(listed) == Own()
    assert describe(Own()) == ""
    own = read(calibrated(*CURVES.values(), launch=1e-6))
    assert own.by == "your own measurement"
    assert describe(own) == "products, attention, memory, launches, all_reduce"
    assert own.attention == POINTS
    assert read(calibrated(*CURVES.values()), kernel="math").attention == ()


def test_memfits_own_step_takes_what_memfit_measured_of_a_card():
    """Not another framework's, whose constants were fitted without, nor the user's own row."""
    h100 = find_device("h100-sxm")
    own = read(h100, kernel="cudnn")
    rows = [r for r in read_rows(LANDED).values() if r["slice"] == "rates"]
    curves = {(c["work"], c["dtype"], c["kernel"]): c["points"] for r in rows for c in r["curves"]}
    assert [list(p) for p in own.attention] == curves["attention", "bf16", "cudnn"]
    assert [list(p) for p in own.products] == curves["matmul", "bf16", ""]
    assert own.memory == curves["memory", "", ""][-1][1]
    small = next(r["launch_seconds"] for r in rows if "launch_seconds" in r)
    assert own.launch == small * AROUND  # nothing runs as quickly inside a model
    assert "memfit's measurement" in own.by
    assert read(h100, own_step=False) == read(replace(h100, own="devices.toml")) == Own()
    assert read(h100.with_context(1)) == read(h100)
    assert parts(h100) != parts(calibrated())
    titan = replace(OWN, framework="torchtitan")
    assert parts(h100, titan) == parts(calibrated(), titan)


def test_another_frameworks_launches_stay_as_fitted():
    slow = calibrated(launch=1.0)
    assert parts(slow, replace(OWN, framework="torchtitan"))["waiting"] < 1
    assert parts(slow)["waiting"] > 1


def test_a_rate_is_read_off_between_two_points_and_held_beyond_the_ends():
    import numpy

    assert rate_at(POINTS, 1.0) == 5e13
    assert rate_at(POINTS, 1e10) == pytest.approx((5e13 + 4e14) / 2)
    assert rate_at(POINTS, 1e20) == 7e14
    sizes = numpy.array([1.0, 1e10, 1e11, 3e12, 1e20])
    assert rate_at(POINTS, sizes) == pytest.approx([rate_at(POINTS, float(n)) for n in sizes])


def test_links_give_what_the_largest_all_reduce_reached():
    setting = read_setting(OWN, MODEL, calibrated())
    own = read(calibrated(CURVES["reduced"]))
    scaled = scale_links(setting.machine.links, own)
    ring = 1e9 * bus_factor("all_reduce", 8) / 2e11
    found = collective_seconds("all_reduce", 1e9, Group(8, 8), scaled)
    assert found == pytest.approx(ring, rel=0.02)  # latencies do not scale
    assert scaled.outside == setting.machine.links.outside


@settings(max_examples=30)
@given(st.sampled_from(sorted(CURVES)), st.floats(1, 20), st.sampled_from([0, 1, 8]))
def test_a_faster_curve_never_slows_a_step(what, more, blocks):
    curve, recipe = CURVES[what], replace(OWN, recompute_blocks=blocks)
    faster = replace(curve, points=tuple((size, more * rate) for size, rate in curve.points))
    slow, fast = (predict_step(read_setting(recipe, MODEL, calibrated(c))) for c in (curve, faster))
    assert fast.total <= slow.total * (1 + 1e-12)
