"""How fast devices train a catalogue model: the predicted rate of a plain step."""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec.structs import replace

from memfit.errors import Error
from memfit.hardware import Device
from memfit.nouns import Noun
from memfit.plan.candidate import Candidate
from memfit.plan.precision import precisions
from memfit.plan.problem import first_recipe, read_problem
from memfit.plan.time import describe_time, predict_timeline
from memfit.recipe import Parallel, Precision
from memfit.request import Hardware, Request, Task

SEQUENCES = 4  # of a micro-batch


class Rate(Noun, frozen=True, kw_only=True):
    """Of one device; None is unknown."""

    tokens_per_second: float | None
    mfu: float | None
    because: str


@lru_cache(maxsize=256)
def predict_rate(model: str, device: Device, count: int) -> Rate:
    """The rate of full training of a catalogue model, each device on its own sequences.

    In the precision that memfit would choose, sequences up to 4,096 tokens, no recompute; weights,
    gradients and states are cut among all devices (FSDP2), over the network that is usual for them.
    Memory is not looked at.
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
    said = f"a step of {model}, {recipe.precision}, {recipe.sequence_length} tokens x {SEQUENCES}"
    if count > 1:
        said += f" on each of {count} devices (FSDP2)"
    return Rate(
        tokens_per_second=time.tokens_per_second_per_device,
        mfu=time.mfu,
        because=f"predicted from {said}: {time.because}",
    )


def _node(device: Device) -> int:
    """Devices of the largest machine that is usual for them; `1/4/8` -> 8."""
    return max(map(int, re.findall(r"\d+", device.devices_per_node)), default=1)
