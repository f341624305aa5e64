"""Seconds of a pipeline: its schedule simulated piece by piece, and closed forms of the same.

A piece starts when its rank is free and what it needs has come: a forward needs the stage before, a
backward the stage after, `send` seconds later where another rank holds it. A send holds up nobody
but who waits for it; where a framework's ranks wait for their own sends (Megatron-LM's 1F1B), their
seconds belong to the pieces. Orders are fixed (`orders`), so that durations may be numpy arrays:
one simulation serves all configurations of one schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.plan.step_time.arrays import Number, everywhere, larger
from memfit.plan.step_time.pipeline.orders import Piece, Schedule, orders

ROUNDING = 1e-11  # of sums of seconds, relative
REACH = 3  # laps that a piece and what precedes it are less apart


class StageTimes(NamedTuple):
    """Seconds of one micro-batch, by stage in the model's order.

    `backward` is that of the inputs (activations), `weight` that of the weights; schedules that do
    not part them run both as one. All may be numpy arrays of one shape.
    """

    forward: Sequence[Number]
    backward: Sequence[Number]
    weight: Sequence[Number]
    send: Number = 0.0

    def of(self, piece: Piece) -> Number:
        """Seconds of one piece."""
        if piece.pass_ == "B":
            return self.backward[piece.stage] + self.weight[piece.stage]
        return {"F": self.forward, "I": self.backward, "W": self.weight}[piece.pass_][piece.stage]


class Ran(NamedTuple):
    """One piece of a simulation, in seconds since the step's first forward."""

    piece: Piece
    start: Number
    end: Number


class Simulated(NamedTuple):
    """A schedule as it ran: each rank's pieces in its order."""

    ranks: tuple[tuple[Ran, ...], ...]

    @property
    def seconds(self) -> Number:
        """From the first piece to the end of the last."""
        latest: Number = 0.0
        for pieces in self.ranks:
            latest = larger(latest, pieces[-1].end)
        return latest

    def idle(self, rank: int) -> Number:
        """Seconds a rank waits: the bubble."""
        return self.seconds - sum(ran.end - ran.start for ran in self.ranks[rank])


def simulate(schedule: Schedule, times: StageTimes) -> Simulated:
    """Run every piece of every rank; the cost grows with the pieces (about 2 µs each).

    Raises InvalidRequest where the durations are not those of the schedule's stages.
    """
    check_stages(schedule, times)
    todo = orders(schedule)
    ends: dict[tuple[str, int, int], Number] = {}
    holder = [schedule.rank(stage) for stage in range(schedule.stages)]
    ran: list[list[Ran]] = [[] for _ in todo]
    waits: dict[tuple[str, int, int], int] = {}  # who stopped for a piece that had not run
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        mine, order = ran[rank], todo[rank]
        now: Number = mine[-1].end if mine else 0.0
        while len(mine) < len(order):
            piece = order[len(mine)]
            pass_, stage, micro_batch = piece
            start = now
            neighbour = stage - 1 if pass_ == "F" else stage + 1 if pass_ != "W" else -1
            if 0 <= neighbour < schedule.stages:
                needed = (pass_, neighbour, micro_batch)
                if needed not in ends:
                    waits[needed] = rank
                    break
                away = holder[neighbour] != rank
                start = larger(now, ends[needed] + times.send if away else ends[needed])
            now = ends[piece] = start + times.of(piece)
            mine.append(Ran(piece, start, now))
            if piece in waits:
                ready.append(waits.pop(piece))
    assert not waits, f"{schedule} waits for itself"
    return Simulated(tuple(map(tuple, ran)))


def check_stages(schedule: Schedule, times: StageTimes) -> None:
    """Raise InvalidRequest where the durations are not those of the schedule's stages."""
    for name, seconds in zip(StageTimes._fields[:3], times[:3], strict=True):
        if len(seconds) != schedule.stages:
            raise InvalidRequest(
                f"`{name}` has {len(seconds)} stages, the schedule {schedule.stages}",
                hint="one duration for each chunk of each rank",
            )


def pipeline_seconds(schedule: Schedule, times: StageTimes) -> Number:
    """Seconds of the whole schedule, without running what repeats itself.

    Exact: an order is the same lap after lap, and what precedes a piece on any rank lies less than
    `REACH` laps back. Where the ends of `REACH` laps all come one and the same time later than a
    lap before, those of all later laps do, and the cool-down's. Where nothing has repeated itself
    within half the micro-batches, all are run.
    """
    laps = _laps(schedule)
    few = 10 * schedule.lap
    while laps and 2 * few <= schedule.micro_batches:
        for lap in laps:
            skipped = (schedule.micro_batches - few) // lap
            short = _with(schedule, schedule.micro_batches - skipped * lap)
            run = simulate(short, times)
            shift = _shift(run, few // 2 - REACH * schedule.lap, few // 2, lap)
            if shift is not None:
                return run.seconds + shift * skipped
        few *= 2
    return simulate(schedule, times).seconds


def _laps(schedule: Schedule) -> Sequence[int]:
    """Micro-batches after which an order may repeat itself."""
    if schedule.kind in ("gpipe", "breadth-first"):
        return ()  # the first backward waits for the last forward
    return (schedule.lap,) if schedule.chunks > 1 else range(1, schedule.ranks + 1)


def _with(schedule: Schedule, micro_batches: int) -> Schedule:
    return Schedule(
        kind=schedule.kind, ranks=schedule.ranks, chunks=schedule.chunks, group=schedule.group,
        micro_batches=micro_batches,
    )  # fmt: skip


def _shift(run: Simulated, first: int, last: int, lap: int) -> Number | None:
    """Seconds by which micro-batches `first` to `last` all end later than those a lap before."""
    ends = {ran.piece: ran.end for pieces in run.ranks for ran in pieces}
    shift: Number | None = None
    for (pass_, stage, micro_batch), end in ends.items():
        if first <= micro_batch < last:
            now = end - ends[Piece(pass_, stage, micro_batch - lap)]
            shift = now if shift is None else shift
            if not everywhere(abs(now - shift) <= ROUNDING * end):
                return None
    return shift
