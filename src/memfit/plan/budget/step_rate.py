"""How fast devices train a catalogue model: the predicted rate of a plain step."""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec.structs import replace

from memfit.core.errors import Error
from memfit.plan.request.precision import precisions
from memfit.plan.request.problem import first_recipe, read_problem
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.search import search
from memfit.plan.step_time.predicted_time import describe_time, predict_timeline
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.recipe import Parallel, Precision
from memfit.records.request import Hardware, Request, Task
from memfit.records.results import Plan, Time

SEQUENCES = 4  # of a micro-batch


class Rate(Record, frozen=True, kw_only=True):
    """Of one device; None is unknown."""

    tokens_per_second: float | None
    mfu: float | None
    because: str


@lru_cache(maxsize=256)
def predict_rate(model: str, device: Device, count: int) -> Rate:
    """The rate of full training of a catalogue model, in sequences up to 4,096 tokens.

    Of one device: of the plan that memfit makes, which fits or says that nothing does. Of more: of
    a plain step in the precision that memfit would choose, each on its own sequences, weights,
    gradients and states cut among all (FSDP2) over the network that is usual for them, nothing
    recomputed; whether that fits is not looked at.
    """
    request = Request(
        model=model,
        weights="random",
        method="full",
        task=Task(global_batch=SEQUENCES, packing=False),  # which some families cannot
        hardware=Hardware(device=device.id),
    )
    try:
        problem = read_problem(request, device=device)
        if count == 1:
            return _planned(search(problem, levers=False))
        precision: Precision = precisions(request, device)[0]
        recipe = first_recipe(problem, method="full", precision=precision)
    except Error as error:
        return Rate(tokens_per_second=None, mfu=None, because=error.message)
    totals = Candidate.of(problem, recipe).totals
    recipe = replace(
        recipe,
        micro_batch=SEQUENCES,
        accumulation=1,
        parallel=Parallel(dp_shard=count),
        devices_per_node=min(count, _node(device)),
    )
    time = describe_time(totals, recipe, device, predict_timeline(totals, recipe, device))
    source = (
        f"a step of {model}, {recipe.precision}, {recipe.sequence_length} tokens x {SEQUENCES} on"
        f" each of {count} devices (FSDP2), nothing recomputed"
    )
    return _rate(time, source)


def _planned(plan: Plan) -> Rate:
    recipe = plan.recipe
    source = (
        f"memfit's plan for {recipe.model.name}, {recipe.precision}, {recipe.sequence_length}"
        f" tokens x {recipe.micro_batch}, {recipe.recompute_blocks} blocks recomputed"
    )
    if plan.memory.verdict == "does_not_fit":
        source += ", which does not fit"
    return _rate(plan.time, source)


def _rate(time: Time, source: str) -> Rate:
    return Rate(
        tokens_per_second=time.tokens_per_second_per_device,
        mfu=time.mfu,
        because=f"predicted from {source}: {time.because}",
    )


def _node(device: Device) -> int:
    """Devices of the largest machine that is usual for them; `1/4/8` -> 8."""
    return max(map(int, re.findall(r"\d+", device.devices_per_node)), default=1)
