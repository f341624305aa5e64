"""A plan certified, with its memory over the events of a step: what the page's timeline shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit import proving
from memfit.nouns import Noun
from memfit.plan.stated import read_stated
from memfit.request import Request
from memfit.results import Certificate, Plan


class StepMemory(Noun, frozen=True, kw_only=True):
    """A certificate, and its curve as `curve.pack` gives it."""

    certificate: Certificate
    plan: Plan | None  # None of many ranks, which are certified as they are stated
    ranks: int
    rank: int | None  # the one asked for; None: the fullest
    curve: dict[str, Any]


def draw_step(
    request: Request, rank: int | None, find_plan: Callable[[Request], Plan]
) -> StepMemory:
    """Of one device the plan, of many what the request states; raises as `certify` does."""
    from memfit.certify.recording import read_recording
    from memfit.curve import draw_curve, pack

    plan = None
    if request.ranks > 1:
        stated = read_stated(request)
        recipe, usable = stated.recipe, stated.usable
    else:
        plan = find_plan(request)
        recipe, usable = plan.recipe, plan.memory.usable
    with tempfile.TemporaryDirectory(prefix="memfit-") as place:
        tape = Path(place) / "recording"
        certificate = proving.certify(recipe, usable=usable, tape=tape, rank=rank)
        curve = pack(draw_curve(read_recording(tape)))
    return StepMemory(
        certificate=certificate, plan=plan, ranks=recipe.parallel.world, rank=rank, curve=curve
    )
