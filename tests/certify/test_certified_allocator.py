"""A recipe's allocator settings decide its certificate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_allocator import EARLIER_FITS, LATER_FITS
from tiny_steps import CPU, H100, make_recipe

from memfit.allocator.caching import replay
from memfit.allocator.settings import Settings, read_settings
from memfit.catalog.overheads import find_overhead
from memfit.certify import trace
from memfit.certify.evidence.certificate import _judge_trace, make_certificate
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB, MIB
from memfit.records.ledger import Phase
from memfit.records.results import Certificate, Memory


def certify(allocator: str, usable: int | None = 80 * GIB) -> Certificate:
    recipe = make_recipe(device=H100.id, precision="bf16", base_format="bf16", allocator=allocator)
    return make_certificate(recipe, H100, usable, None)


def test_settings_change_what_is_reserved_and_are_named() -> None:
    plain, pages = certify(""), certify("expandable_segments:True")
    assert plain.memory.peak_allocated == pages.memory.peak_allocated
    tape = trace(plain.recipe, H100).tape
    for found, expandable in ((plain, False), (pages, True)):
        settings = Settings(expandable_segments=expandable, device_memory=80 * GIB)
        assert found.memory.peak_reserved == replay(tape, settings).peaks.reserved
    assert "one stream; the CUDA allocator at its defaults" in plain.bounds
    assert "one stream; the CUDA allocator set to expandable_segments:True" in pages.bounds
    rounded = certify("roundup_power2_divisions:1,max_split_size_mb:64")
    coarse = certify("roundup_power2_divisions:2")
    assert rounded.memory.peak_allocated == plain.memory.peak_allocated  # 1 divides nothing
    assert coarse.memory.peak_allocated > plain.memory.peak_allocated


@pytest.mark.parametrize(("tape", "typical"), [(LATER_FITS, 130), (EARLIER_FITS, 80)])
def test_the_range_holds_what_other_orders_of_addresses_reserve(tape, typical: int) -> None:
    """Of tapes by hand, which take 80 MiB in some orders and 130 in others."""
    recipe = make_recipe(device=H100.id, precision="bf16", base_format="bf16")
    by_hand = replace(trace(recipe, H100), tape=tape, marks=(), stretches=(Phase.FORWARD,))
    overhead, least, most = find_overhead(H100), 80 * MIB, 130 * MIB

    def judge(usable: int, allocator: str = "") -> Memory:
        settings = read_settings(allocator, device_memory=80 * GIB)
        return _judge_trace(by_hand, H100, settings, usable, recipe.parallel)[0]

    made = judge(80 * GIB)
    assert made.peak_reserved == typical * MIB
    assert (made.total_low, made.total_high) == (least + overhead.low, most + overhead.high)
    assert "0.08 GiB to 0.13 GiB by the order in which the driver gives" in made.because
    verdicts = [judge(most + overhead.high - less).verdict for less in (0, 1)]
    assert verdicts == ["fits", "at_risk"]
    verdicts = [judge(least + overhead.low - less).verdict for less in (0, 1)]
    assert verdicts == ["at_risk", "does_not_fit"]
    pages = judge(80 * GIB, "expandable_segments:True")
    assert pages.total_low - overhead.low == pages.total_high - overhead.high


def test_a_fraction_that_is_too_small_is_a_verdict_that_says_so() -> None:
    tight = certify("per_process_memory_fraction:0.00001")  # 0.8 MiB of 80 GiB
    assert tight.memory.verdict == "does_not_fit"
    assert "fails in load at" in tight.memory.because
    assert "the recipe allows itself" in tight.memory.because
    assert tight.memory.peak_reserved == certify("").memory.peak_reserved  # what it would take
    assert certify("per_process_memory_fraction:0.5").memory.verdict == "fits"


def test_a_threshold_without_a_fraction_is_said_to_do_nothing() -> None:
    said = certify("garbage_collection_threshold:0.5").bounds
    assert any("garbage_collection_threshold does nothing" in bound for bound in said)


@pytest.mark.parametrize(
    ("device", "text"), [(CPU, "expandable_segments:True"), (H100, "max_split_size_mb:1")]
)
def test_what_cannot_be_set_is_refused(device, text: str) -> None:
    with pytest.raises(InvalidRequest, match="allocator"):
        make_certificate(make_recipe(device=device.id, allocator=text), device, None, None)
