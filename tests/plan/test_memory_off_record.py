"""Devices whose usable memory is not on record: the data sheet is an upper bound everywhere."""

import pytest
from msgspec.structs import replace

from memfit import api, catalog
from memfit.core.units import GIB
from memfit.records.hardware import LEAST_SHARE, Device

OFF_RECORD = [d for d in catalog.devices() if d.memory is None and not d.is_cpu]


def test_no_device_on_record_exceeds_its_data_sheet():
    """So that a data sheet's GB, taken as GiB, is an upper bound."""
    for device in catalog.devices():
        if device.memory is not None:
            sheet = replace(device, memory=None).most_memory
            assert sheet is not None, device.id
            assert device.memory >= LEAST_SHARE * sheet
            assert device.memory <= max(device.memory, device.memory_driver or 0) <= sheet
            assert device.most_memory == device.memory


def test_every_accelerator_has_an_upper_bound():
    assert len(OFF_RECORD) > 20
    assert all(device.most_memory for device in OFF_RECORD)
    most = {d.id: d.most_memory for d in OFF_RECORD}
    assert most["mi325x"] == 256 * GIB
    assert most["apple-m2-ultra"] == 192 * GIB  # the largest of 64/128/192 GB


SHARE = 4  # one device in so many is part of `make test`
DEVICES = [
    pytest.param(device, marks=[pytest.mark.wide] if n % SHARE else [], id=device.id)
    for n, device in enumerate(OFF_RECORD)
]


@pytest.mark.parametrize("device", DEVICES)
def test_no_plan_exceeds_the_data_sheet(device: Device):
    plan = api.plan(api.read("llama-3.1-8b", device=device.id), levers=False)
    assert plan.memory.usable == round(LEAST_SHARE * device.most_memory)
    assert "data sheet" in plan.memory.because
    if plan.memory.verdict == "does_not_fit":
        assert plan.memory.needed > plan.memory.usable
    else:
        assert plan.memory.needed <= device.most_memory


@pytest.mark.parametrize("framework", ["memfit", "torchtitan", "hf-trainer"])
def test_what_exceeds_the_data_sheet_does_not_fit_in_any_step(framework):
    request = api.read(
        "llama-3.1-70b", device="mi325x", changes={"framework": framework, "method": "full"}
    )
    memory = api.plan(request, levers=False).memory
    assert memory.verdict == "does_not_fit"
    assert memory.usable == round(LEAST_SHARE * 256 * GIB)
    assert "data sheet" in memory.because


def test_a_limit_above_the_data_sheet_does_not_raise_it():
    request = api.read("llama-3.1-8b", device="mi325x", memory="300 GiB")
    assert api.plan(request, levers=False).memory.usable == 256 * GIB
    other = api.read(
        "llama-3.1-8b", device="mi325x", memory="300 GiB", changes={"framework": "torchtitan"}
    )
    assert api.plan(other, levers=False).memory.usable == 256 * GIB
    below = api.plan(api.read("llama-3.1-8b", device="mi325x", memory="120 GiB"), levers=False)
    assert below.memory.usable == 120 * GIB
    assert "data sheet" not in below.memory.because  # the request says what there is


def test_what_is_shown_of_a_plan_that_does_not_fit_is_more_than_is_usable():
    """Without a context on record the bytes that are reserved decide, and are what is shown."""
    stated = {"method": "full", "precision": "fp32", "hardware.device": "apple-m2"}
    memory = api.plan(api.read("llama-3.2-1b", changes=stated), levers=False).memory
    assert (memory.verdict, memory.device_total) == ("does_not_fit", None)
    assert memory.peak_allocated < memory.usable < memory.peak_reserved == memory.needed


def test_what_is_solved_for_keeps_to_the_data_sheet():
    stated = {"method": "full", "precision": "bf16-mixed", "recompute": "none", "loss": "chunked"}
    solved = api.solve("micro_batch", api.read("smollm2-135m", device="h20", changes=stated))
    assert 0 < solved.plan.memory.needed <= LEAST_SHARE * 96 * GIB


@pytest.mark.usefixtures("certified_here")
def test_a_certificate_says_what_its_limit_is():
    plan = api.plan(
        api.read("smollm2-135m", device="mi325x", changes={"task.sequence_length": 128}),
        levers=False,
    )
    proof = api.certify(plan.recipe, usable=plan.memory.usable)
    assert proof.memory.verdict == "fits"
    assert "data sheet" in proof.memory.because
