"""A plan certified, with its memory over the events of a step: what the page's timeline shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.plan.request.as_stated import read_unplanned
from memfit.records import Record
from memfit.records.request import Request
from memfit.records.results import Certificate, Plan
from memfit.workflows import certify_request


class StepMemory(Record, frozen=True, kw_only=True):
    """A certificate, and its curve as `curve.pack` gives it."""

    certificate: Certificate
    plan: Plan | None  # None where many ranks can run what no plan describes
    because: str  # why there is no plan, and what was certified instead; "" where there is one
    ranks: int
    rank: int | None  # the one asked for; None: the fullest
    curve: dict[str, Any]


def draw_step(
    request: Request,
    rank: int | None,
    find_plan: Callable[[Request], Plan],
    on_phase: Callable[[str], None] = lambda _: None,
) -> StepMemory:
    """Of the plan; where none describes what many ranks can run, of what the request states.

    on_phase: called with what begins, for whoever shows progress.
    Raises as `certify` does, and InvalidRequest for another framework's step.
    """
    from memfit.certify.evidence.recording import read_recording
    from memfit.report.curve import draw_curve, pack

    on_phase("planning")
    stated = read_unplanned(request)
    plan = None if stated else find_plan(request)
    if stated:
        recipe, usable = stated.recipe, stated.usable
    else:
        assert plan is not None
        recipe, usable = plan.recipe, plan.memory.usable
    with tempfile.TemporaryDirectory(prefix="memfit-") as place:
        tape = Path(place) / "recording"
        on_phase("running the step on fake tensors")
        certificate = certify_request.certify(recipe, usable=usable, tape=tape, rank=rank)
        on_phase("drawing")
        curve = pack(draw_curve(read_recording(tape)))
    return StepMemory(
        certificate=certificate, plan=plan, because=stated.because if stated else "",
        ranks=recipe.parallel.world, rank=rank, curve=curve,
    )  # fmt: skip
