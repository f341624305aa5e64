"""A plan's pipeline as its schedule runs it: each rank's pieces, in the predicted seconds."""

from __future__ import annotations

from typing import NamedTuple

from memfit.plan.step_time.pipeline.exact import count_sends
from memfit.plan.step_time.pipeline.orders import Pass, Schedule, find_schedule
from memfit.plan.step_time.pipeline.schedules import StageTimes, simulate
from memfit.records import Record
from memfit.records.results import Plan


class Slot(NamedTuple):
    """One pass of one micro-batch through one chunk of a rank; seconds since the first forward."""

    pass_: Pass
    micro_batch: int
    chunk: int
    start: float
    end: float


class Strip(Record, frozen=True, kw_only=True):
    """The pieces of every rank of a pipeline, in its order."""

    kind: str
    micro_batches: int
    chunks: int  # of a rank
    pieces: int  # in all
    seconds: float | None  # from the first piece to the end of the last; None where nothing is run
    ranks: tuple[tuple[Slot, ...], ...]  # empty where nothing is run
    because: str


def draw_strip(plan: Plan, most: int) -> Strip | None:
    """The pipeline of a plan; None without one.

    Without pieces where there are more than `most`, or where the plan knows no time.
    """
    if plan.recipe.parallel.pp == 1:
        return None
    schedule = find_schedule(plan.recipe)
    pieces = 2 * schedule.stages * schedule.micro_batches
    ranks: tuple[tuple[Slot, ...], ...] = ()
    if not plan.timeline.spans:
        note = plan.time.because
    elif pieces > most:
        note = f"more than {most:,} pieces, not drawn"
    else:
        note = "stages alike but for the last one's head"
        ranks = tuple(
            tuple(
                Slot(piece.pass_, piece.micro_batch, piece.stage // schedule.ranks, start, end)
                for piece, start, end in ran
            )
            for ran in simulate(schedule, _stage_times(plan, schedule)).ranks
        )
    return Strip(
        kind=schedule.kind, micro_batches=schedule.micro_batches, chunks=schedule.chunks,
        pieces=pieces, ranks=ranks, because=note,
        seconds=max((slots[-1].end for slots in ranks), default=None),
    )  # fmt: skip


def _stage_times(plan: Plan, schedule: Schedule) -> StageTimes:
    """Seconds of one micro-batch and chunk, out of those of the longest stage.

    What is known of both ways together counts half each way, and half of the backward is that of
    the weights.
    """
    seconds = dict.fromkeys(("forward", "backward", "repeated", "head", "tensor", "waiting"), 0.0)
    seconds |= {"sending": 0.0} | {span.op: span.duration for span in plan.timeline.spans}
    pieces = schedule.micro_batches * schedule.chunks
    ways = (seconds["tensor"] + seconds["waiting"]) / 2
    forward = [(seconds["forward"] + ways) / pieces] * schedule.stages
    backward = [(seconds["backward"] / 2 + seconds["repeated"] + ways) / pieces] * schedule.stages
    weight = [seconds["backward"] / 2 / pieces] * schedule.stages
    backward[-1] += seconds["head"] / schedule.micro_batches
    sends = count_sends(schedule.ranks, schedule.chunks, schedule.micro_batches)
    return StageTimes(forward, backward, weight, seconds["sending"] / sends)
