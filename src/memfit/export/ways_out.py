"""What to change where the tool's own step does not fit."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from memfit.core import units
from memfit.core.errors import DoesNotFit, Error
from memfit.core.wording import VERDICTS
from memfit.export.settle import settle
from memfit.optimizers import optimizers
from memfit.plan.questions.ways_out import find_ways_out, type_options
from memfit.records.recipe import ADAPTED
from memfit.records.request import Request, change
from memfit.records.results import Plan

if TYPE_CHECKING:
    from memfit.export.target import Job, Target

SHOWN = 4


def refuse_what_does_not_fit(source: Plan | Request, job: Job, target: Target) -> None:
    """Raise DoesNotFit with the nearest changes, for a plan that does not fit where it will run."""
    memory, recipe = job.plan.memory, job.recipe
    if memory.verdict != "does_not_fit":
        return
    request = source.request if isinstance(source, Plan) else source
    needs = "more" if memory.needed is None else units.show_bytes(memory.needed)
    usable = "there is" if memory.usable is None else f"{units.show_bytes(memory.usable)} usable"
    ways = find_ways(request, job.plan, target)
    none = "no change that memfit tries fits; a smaller model, or shorter rows"
    raise DoesNotFit(
        f"{VERDICTS['does_not_fit']}: `{recipe.model.name}` ({recipe.method}, {recipe.precision},"
        f" {recipe.optimizer.name}) needs {needs} of {usable} on {recipe.device} in the step of"
        f" `{target.name}`: nothing is written",
        hint="; ".join(ways) or none,
    )


def find_ways(request: Request, nearest: Plan, target: Target) -> list[str]:
    """Changes under which the target's own step fits, as one types them, each with its title."""

    def plan_there(changed: Request) -> Plan:
        return settle(changed, target).job.plan

    found = _rounded(request, target)
    for way in find_ways_out(request, nearest, plan_there):
        found.append(f"`{shlex.join(way.options)}` ({way.title})")
    return found[:SHOWN]


def _rounded(request: Request, target: Target) -> list[str]:
    """The same training with optimizer states of 8 bits, where the weights are all trained."""
    own = "adamw" if request.optimizer.name == "auto" else request.optimizer.name
    smaller = optimizers.find(own).low_bit_form
    if request.method in ADAPTED or not smaller:
        return []
    changes = {"optimizer.name": smaller}
    try:
        plan = settle(change(request, changes), target).job.plan
    except Error:
        return []
    if plan.memory.verdict != "fits":
        return []
    bits = optimizers.find(smaller).state_bits
    return [f"`{shlex.join(type_options(changes))}` (states of {bits} bits)"]
