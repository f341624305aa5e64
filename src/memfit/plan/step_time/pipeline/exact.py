"""What ranks of a pipeline wait for, in closed form.

tests/plan/step_time/pipeline_paths.py has the formulas of whole schedules that these are parts of,
and test_schedules.py holds those to the simulation (`schedules.simulate`).
"""

from __future__ import annotations

from functools import lru_cache

from memfit.plan.step_time.arrays import Number, ceil_div, where
from memfit.plan.step_time.pipeline.orders import Schedule
from memfit.plan.step_time.pipeline.schedules import StageTimes, pipeline_seconds


def count_sends(ranks: Number, chunks: Number, micro_batches: Number) -> Number:
    """Messages that `1f1b`, or `interleaved`, waits for.

    One chunk: rounds of as many micro-batches as ranks, each of 2 sends a hop. More chunks hide all
    but the first way through the model and the last one back.
    """
    hops = ranks - 1
    rounds = hops + micro_batches - 1 - ceil_div(micro_batches - 1, ranks)
    ways = where(chunks == 1, rounds, ranks * chunks - 1)
    return where(hops > 0, 2 * ways, 0)


def waiting_seconds(
    ranks: Number, chunks: Number, longest: Number, mean: Number, send: Number
) -> Number:
    """Seconds beyond its own work that the rank of the longest stage waits.

    Of `1f1b` and `interleaved`, where the longest stage is the last: its first micro-batch comes,
    and its last goes back, through all others. longest, mean: seconds of a micro-batch on a rank;
    send: of a micro-batch's messages over one boundary, to and fro. Every number may be an array.
    """
    return (ranks * mean - longest + (ranks - 1) * send) / chunks


ORDINARY = ("gpipe", "1f1b", "interleaved")  # ranks wait as long under each of them


@lru_cache(maxsize=256)
def bubble_share(schedule: Schedule) -> float:
    """Seconds that a schedule's ranks wait, over `1f1b`'s, or `interleaved`'s of as many chunks.

    Simulated with forward, backward of inputs and of weights alike, a third each.
    """
    if schedule.ranks == 1 or schedule.kind in ORDINARY:
        return 1.0
    third = [1.0] * schedule.stages
    whole = pipeline_seconds(schedule, StageTimes(third, third, third))
    work = 3.0 * schedule.chunks * schedule.micro_batches
    return float(whole - work) / (3.0 * (schedule.ranks - 1))
