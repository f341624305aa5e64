"""The certificate: a process of its own, three numbers that add up, and the verdict's edges."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from tiny_steps import CPU, H100, make_device, make_recipe, watch_real_step

from memfit.allocator.caching import replay
from memfit.allocator.settings import Settings
from memfit.allocator.tape import Event
from memfit.catalog.overheads import find_overhead
from memfit.certify import (
    BatchShape,
    Order,
    _read_answers,
    certify,
    certify_all,
    in_this_process,
    trace,
)
from memfit.certify.evidence.certificate import _judge, make_certificate
from memfit.certify.tracing.recorder import Trace
from memfit.certify.tracing.trace_step import worst_shapes
from memfit.core.errors import Error, InvalidRequest, NotCertified
from memfit.core.libraries import install_extra
from memfit.core.units import GIB, MIB
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.results import Certificate
from memfit.screens.widgets.memory import parts_of

BF16 = {"precision": "bf16", "base_format": "bf16"}


LORA = make_recipe(method="lora", recompute_blocks=2)
PACKED = make_recipe(packing=True)
SHAPES = (BatchShape(rows=2, tokens=48, documents=((20, 28), (48,))),)
ORDERS = {
    "first": Order(recipe=LORA, device=CPU, usable=None),
    "too long": Order(recipe=make_recipe("gpt2", sequence_length=400), device=CPU, usable=None),
    "of shapes": Order(recipe=PACKED, device=CPU, usable=GIB, batches=SHAPES),
    "no such device": Order(
        recipe=make_recipe(), device=make_device("Google", "tpu-v5e", None), usable=None
    ),
    "again": Order(recipe=LORA, device=CPU, usable=None),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Certificate | Error]:
    """Of one process of its own, which has imported nothing before the first order."""
    return dict(zip(ORDERS, certify_all([*ORDERS.values()]), strict=True))


def test_the_child_certifies_what_this_process_traces(answers: Any) -> None:
    made, traced = answers["of shapes"], trace(PACKED, CPU, SHAPES)
    assert made.recipe_digest == PACKED.digest
    assert made.recipe == PACKED
    later = {"generate": made.generation.peak_allocated}
    assert made.phases == {str(phase): n for phase, n in traced.phases.items()} | later
    assert made.ledger == traced.ledger
    assert made.at_peak == traced.at_peak
    assert made.bounds == traced.bounds
    assert made.memory.peak_allocated == traced.peak
    assert made.memory.verdict == "fits"
    assert made.seconds > 0
    assert made.versions["torch"] == version("torch")


def test_what_can_run_nowhere_is_the_users_error_and_the_rest_is_not_certified(
    answers: Any,
) -> None:
    """An answer that is an error is raised where one certificate was asked for."""
    too_long, no_device = answers["too long"], answers["no such device"]
    assert isinstance(too_long, InvalidRequest)
    assert "256 positions" in too_long.message
    assert isinstance(no_device, NotCertified)
    assert "tpu-v5e" in no_device.message
    assert no_device.exit_code == 4
    assert no_device.hint
    with in_this_process(), pytest.raises(InvalidRequest, match="256 positions"):
        certify(ORDERS["too long"].recipe, CPU, None)


def test_a_crashed_child_is_not_certified_with_its_last_lines() -> None:
    crash = [sys.executable, "-c", "import os, sys; print('why', file=sys.stderr); os.abort()"]
    child = subprocess.run(crash, capture_output=True, text=True)
    (crashed,) = _read_answers(child.returncode, child.stdout, child.stderr, 1)
    assert isinstance(crashed, NotCertified)
    assert "code -6:\nwhy" in crashed.message


def test_one_process_answers_each_order_on_its_own(answers: Any) -> None:
    """An order's error harms no neighbour, and what was traced before changes none."""
    first, again = answers["first"], answers["again"]
    assert (first.at_peak, first.phases) == (again.at_peak, again.phases)
    assert first.ledger == again.ledger == trace(LORA, CPU).ledger


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, memfit.certify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_on_a_cpu_the_process_is_held_against_the_limit() -> None:
    """What it has imported was measured; the band around the rest decides."""
    recipe, here = make_recipe(), CPU.with_context(300 * MIB)
    peak = trace(recipe, CPU).peak
    made = make_certificate(recipe, here, None, None).memory
    assert (made.verdict, made.peak_allocated) == ("unproven", peak)
    assert 300 * MIB + peak <= made.total_low < made.device_total < made.total_high < 600 * MIB
    assert sum(e.nbytes for e in made.entries) == made.device_total
    (process,) = [e for e in made.entries if e.owner == "process"]
    assert "300.00 MiB" in process.because or "0.29 GiB" in process.because

    def judge(usable: int) -> str:
        return make_certificate(recipe, here, usable, None).memory.verdict

    assert judge(made.total_high) == "fits"
    assert judge(made.total_high - 1) == judge(made.total_low) == "at_risk"
    assert judge(made.total_low - 1) == "does_not_fit"


def test_on_cuda_the_entries_add_up_to_the_device_total() -> None:
    recipe = make_recipe(**BF16, accumulation=2)
    made = make_certificate(recipe, H100, 80 * GIB, None)
    traced = trace(recipe, H100)
    peaks = replay(traced.tape, Settings(), traced.marks).peaks
    memory, overhead = made.memory, find_overhead(H100)
    assert memory.peak_allocated == peaks.allocated == max(made.phases.values())
    assert memory.peak_reserved == peaks.reserved
    assert memory.device_total == peaks.reserved + overhead.typical
    assert sum(e.nbytes for e in memory.entries) == memory.device_total
    assert {e.kind for e in memory.entries} > {Kind.CONTEXT, Kind.FRAGMENTATION}
    assert sum(n for _, n in parts_of(memory)) == memory.device_total  # as the screen shows them
    assert made.ledger == traced.ledger  # of tensors alone, as a prediction's is
    assert {e.phase for e in memory.entries} == {Phase(memory.peak_phase)}


def test_the_verdict_on_cuda_holds_the_whole_band_of_the_context_against_the_limit() -> None:
    recipe = make_recipe(**BF16)
    overhead = find_overhead(H100)

    def judge(usable: int) -> str:
        return make_certificate(recipe, H100, usable, None).memory.verdict

    reserved = make_certificate(recipe, H100, None, None).memory.peak_reserved
    assert judge(reserved + overhead.high) == "fits"
    assert judge(reserved + overhead.high - 1) == "at_risk"
    assert judge(reserved + overhead.low) == "at_risk"
    assert judge(reserved + overhead.low - 4 * MIB) == "does_not_fit"


def test_what_fits_only_by_giving_segments_back_is_at_risk() -> None:
    tape = (Event(0, 30 * MIB), Event(0, 0), Event(1, 38 * MIB))
    traced = Trace(
        phases={}, ledger=Ledger(entries=()), tape=tape, marks=(),
        stretches=(Phase.LOAD,), bounds=(), host={}, tensor=lambda _: None, alive=lambda _: (),
    )  # fmt: skip
    overhead = find_overhead(H100)
    reserved = replay(tape, Settings()).peaks.reserved
    usable = 40 * MIB + overhead.low
    verdict, because = _judge(traced, Settings(), reserved, overhead, usable)
    assert (verdict, "giving cached segments back" in because) == ("at_risk", True)
    verdict, because = _judge(traced, Settings(), reserved, overhead, usable - 4 * MIB)
    assert (verdict, "38.00 MiB fails in load" in because) == ("does_not_fit", True)


def test_what_building_imports_is_not_counted(answers: Any) -> None:
    """The first order's building imports transformers and peft."""
    real = watch_real_step(LORA, worst_shapes(LORA))
    assert answers["first"].memory.peak_allocated == real.peak


def test_a_device_without_a_row_of_overheads_has_no_total() -> None:
    unknown = make_device("Unknown", "x", None)
    assert find_overhead(unknown) is None
    row = find_overhead(H100)
    assert 0 < row.low < row.typical < row.high
    assert row.source


def test_a_missing_library_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr("memfit.certify.NEEDED", ("torch", "a_library_that_nobody_has"))
    with pytest.raises(NotCertified, match="`a_library_that_nobody_has` is not installed") as said:
        certify(make_recipe(), CPU, None)
    assert said.value.hint == install_extra("train")
