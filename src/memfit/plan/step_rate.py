"""How fast devices train a catalogue model: the predicted rate of a plain step."""

from __future__ import annotations

from functools import lru_cache

from memfit.errors import Error
from memfit.hardware import Device
from memfit.nouns import Noun
from memfit.plan.candidate import Candidate
from memfit.plan.precision import precisions
from memfit.plan.problem import first_recipe, read_problem
from memfit.plan.time import describe_time, predict_timeline
from memfit.recipe import Precision
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

    In the precision that memfit would choose, sequences up to 4,096 tokens, no recompute. Memory is
    not looked at, nor what `count` devices say to one another: an upper bound for many devices.
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
        candidate = Candidate.of(problem, recipe).but(micro_batch=SEQUENCES, accumulation=1)
    except Error as error:
        return Rate(tokens_per_second=None, mfu=None, because=error.message)
    timeline = predict_timeline(candidate.totals, candidate.recipe, device)
    time = describe_time(candidate.totals, candidate.recipe, device, timeline)
    if time.tokens_per_second is None:
        return Rate(tokens_per_second=None, mfu=None, because=time.because)
    said = f"a step of {model}, {recipe.precision}, {recipe.sequence_length} tokens x {SEQUENCES}"
    if count > 1:
        said += f" on each of {count} devices, without what they say to one another"
    return Rate(
        tokens_per_second=time.tokens_per_second,
        mfu=time.mfu,
        because=f"predicted from {said}, by {time.basis}",
    )
