"""Seconds of a pipeline in closed form: the longest of a few paths through its schedule.

A schedule is a graph of pieces, and takes as long as its longest path (`schedules.simulate` finds
it). Each path here is one of that graph's, so that no figure is above the simulation's. They are:
a rank that works from its first forward to its last backward; the same from when the first backward
reaches it, or until its last forward leaves it; and, where sends take time, rounds from a rank down
to the last one and back. test_schedules.py holds them against the simulation:

- equal for `gpipe` always; for `1f1b`, `interleaved` (sends no longer than a pass, whole laps)
  where all stages are alike or only the last is longer; for `zb-h1` alike and without sends;
- for uneven stages (30 % either way) within 8 % for `1f1b` and `zb-h1`, within 13 % for
  `interleaved`; 1 % and 2 % in the median. Such stages are for the simulation.

Durations may be numpy arrays; ranks, chunks and micro-batches are numbers but in `even_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from memfit.core.errors import InvalidRequest
from memfit.plan.step_time.arrays import Number, larger
from memfit.plan.step_time.pipeline.exact import count_sends
from memfit.plan.step_time.pipeline.orders import Kind, Schedule, count_warm_up
from memfit.plan.step_time.pipeline.schedules import StageTimes, check_stages


def even_seconds(
    kind: Kind, ranks: Number, chunks: Number, micro_batches: Number, times: Sequence[Number]
) -> Number:
    """Seconds where all stages are alike; every number may be an array.

    `times` are a chunk's forward, backward of inputs, backward of weights, and a send. Each
    formula is exact under the module's conditions; the bubbles without sends are those of
    2104.04473 (sections 2.2) and 2401.10241 (table 2). Raises InvalidRequest for `zb-v` and
    `breadth-first`, which only the simulation knows.
    """
    forward, backward, weight, send = times
    both, hops = forward + backward + weight, ranks - 1
    if kind == "gpipe":
        return (micro_batches + hops) * both + 2 * hops * send
    if kind in ("1f1b", "interleaved"):
        sends = count_sends(ranks, chunks, micro_batches)
        return (micro_batches * chunks + hops) * both + sends * send
    if kind == "zb-h1":
        waits = larger(forward + backward - weight, larger(forward, backward))
        return micro_batches * chunks * both + hops * (waits + 2 * send)
    raise InvalidRequest(f"no closed form of `{kind}`", hint="`pipeline_seconds` simulates it")


def path_seconds(schedule: Schedule, times: StageTimes) -> Number:
    """Seconds of the longest path of those above; stages may be uneven.

    Raises InvalidRequest for `zb-v`, `breadth-first` and a `zb-h1` of several chunks, or as
    `simulate` does.
    """
    check_stages(schedule, times)
    if schedule.kind == "gpipe":
        return _all_forward_first(schedule, times)
    if schedule.kind == "zb-h1" and schedule.chunks == 1:
        return _longest(_split_paths(schedule, times))
    if schedule.kind in ("1f1b", "interleaved"):
        rounds = _rounds(schedule, times) if schedule.chunks == 1 else ()
        return _longest([*rounds, *_paths(schedule, times)])
    raise InvalidRequest(
        f"no closed form of `{schedule.kind}`", hint="`pipeline_seconds` simulates it"
    )


def _longest(paths: Iterable[Number]) -> Number:
    found: Number = 0.0
    for path in paths:
        found = larger(found, path)
    return found


def _sums(durations: Sequence[Number]) -> list[Number]:
    """Sums of the first 0, 1, 2, … durations."""
    return list(accumulate(durations, initial=0.0))


def _all_forward_first(schedule: Schedule, times: StageTimes) -> Number:
    """Two flow shops of equal jobs, one after the other: each waits for its slowest stage alone."""
    back = [b + w for b, w in zip(times.backward, times.weight, strict=True)]
    more, hops = schedule.micro_batches - 1, schedule.ranks - 1
    slowest = _longest(times.forward) + _longest(back)
    return sum(times.forward) + sum(back) + more * slowest + 2 * hops * times.send


def _rounds(schedule: Schedule, times: StageTimes) -> Iterator[Number]:
    """1F1B: from a rank to the last one and back, over and over.

    Rank i has p - i micro-batches under way, so that a round from it brings the path p - i
    micro-batches on; staying on one rank for a forward and a backward brings it one on.
    """
    ranks, send, more = schedule.ranks, times.send, schedule.micro_batches - 1
    each = [sum(parts) for parts in zip(*times[:3], strict=True)]
    total = _sums(each)
    rounds = [total[-1] - total[i] + 2 * (ranks - 1 - i) * send for i in range(ranks)]
    for i, (alone, whole) in enumerate(zip(each, rounds, strict=True)):
        under_way = ranks - i
        if more >= under_way:
            yield rounds[0] + whole + (more - under_way) * alone
        times_round, rest = divmod(more, under_way)
        yield rounds[0] + times_round * whole + (rounds[ranks - rest] if rest else 0.0)


def _paths(schedule: Schedule, times: StageTimes) -> Iterator[Number]:
    """1F1B, interleaved: a rank that never waits, and the ways to it and from it."""
    ranks, stages = schedule.ranks, schedule.stages
    send = times.send if ranks > 1 else 0.0  # one rank sends its chunks' work to itself
    back = [b + w for b, w in zip(times.backward, times.weight, strict=True)]
    forward, backward = _sums(times.forward), _sums(back)
    for rank in range(ranks):
        mine = range(rank, stages, ranks)
        last = mine[-1]
        work = schedule.micro_batches * sum(times.forward[s] + back[s] for s in mine)
        ahead = min(
            count_warm_up(schedule, rank) + 1, schedule.micro_batches * schedule.chunks
        )  # forwards before the first backward, and backwards after the last forward
        first = _first_of(schedule, ahead)
        final = _last_of(schedule, ahead)[::-1]
        warm_up = sum(n * times.forward[s] for n, s in zip(first, mine, strict=True))
        cool_down = sum(n * back[s] for n, s in zip(final, mine, strict=True))
        # to the rank's first piece and from its last one; to the end of its first backward; from
        # the end of its last forward
        to = forward[rank] + backward[rank] + 2 * rank * send
        returned = forward[-1] + backward[-1] - backward[last] + (2 * (stages - 1) - last) * send
        leaving = forward[-1] - forward[last + 1] + backward[-1] + (2 * (stages - 1) - last) * send
        start, end = forward[rank] + rank * send, backward[rank] + rank * send
        rest = work - warm_up - back[last]
        yield to + work
        yield returned + rest + end
        yield start + work - cool_down + leaving
        if ahead < schedule.micro_batches * schedule.chunks:
            yield returned + rest - cool_down + leaving


def _first_of(schedule: Schedule, pieces: int) -> tuple[int, ...]:
    """How many of a rank's first forwards are of each chunk; the last lap may be short."""
    lap, chunks = schedule.lap, schedule.chunks
    whole, rest = divmod(pieces, lap * chunks)
    size = min(lap, schedule.micro_batches - whole * lap)
    return tuple(whole * lap + min(max(rest - c * size, 0), size) for c in range(chunks))


def _last_of(schedule: Schedule, pieces: int) -> tuple[int, ...]:
    """The same of its last ones, in the order of the first."""
    earlier = _first_of(schedule, schedule.micro_batches * schedule.chunks - pieces)
    return tuple(schedule.micro_batches - n for n in earlier)


def _split_paths(schedule: Schedule, times: StageTimes) -> Iterator[Number]:
    """ZB-H1: as `_paths`; after its last backward of inputs, a rank's weights are still to do."""
    ranks, count, send = schedule.ranks, schedule.micro_batches, times.send
    forward, backward = _sums(times.forward), _sums(times.backward)
    for rank in range(ranks):
        f, b, w = times.forward[rank], times.backward[rank], times.weight[rank]
        ahead = min(count_warm_up(schedule, rank) + 1, count)
        start = forward[rank] + rank * send
        returned = forward[-1] + backward[-1] - backward[rank] + (2 * (ranks - 1) - rank) * send
        rest = returned - b - ahead * f  # what the rank does follows the first backward
        left = min(count, rank + 1)
        to_last_backward = count * (f + b + w) - left * w
        turns = count - ahead  # backwards before the last forward
        to_last_forward = count * f + turns * b + max(0, turns - rank) * w
        for other in range(ranks):
            weights = min(count, other + 1) * times.weight[other]
            if other <= rank:
                way = backward[rank] - backward[other] + (rank - other) * send + weights
                yield larger(start, rest) + to_last_backward + way
            way = forward[-1] - forward[rank + 1] + backward[-1] - backward[other] + weights
            way += (2 * (ranks - 1) - rank - other) * send
            yield start + to_last_forward + way
            if turns:
                yield rest + to_last_forward + way
