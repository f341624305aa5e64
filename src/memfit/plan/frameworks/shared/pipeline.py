"""Pipelines: which blocks a stage holds, and how many micro-batches it has in flight.

Source: Narayanan et al. 2104.04473 (1F1B, interleaved) and Megatron-LM's
megatron/core/pipeline_parallel/schedules.py (get_pp_rank_microbatches).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from memfit.plan.step_time.arrays import Number, larger, smaller


def deal_blocks(layers: int, stages: int, chunks: int) -> tuple[tuple[range, ...], ...]:
    """Blocks of each stage's chunks: chunk c of stage i is the (c x stages + i)th piece.

    The pieces are equal but for a remainder, which goes to the first ones.
    """
    pieces = stages * chunks
    each, more = divmod(layers, pieces)
    return deal_sizes([each + (i < more) for i in range(pieces)], stages)


def deal_sizes(sizes: Sequence[int], stages: int) -> tuple[tuple[range, ...], ...]:
    """The same where the pieces have those sizes, in the order of the model."""
    starts = accumulate(sizes[:-1], initial=0)
    pieces = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return tuple(tuple(pieces[stage::stages]) for stage in range(stages))


def deal_by_cost(layers: int, block: int, head: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, where one is full when its costs reach its share of all."""
    total = layers * block + head
    counts, done, at = [0] * stages, 0, 0
    for _ in range(layers):
        counts[at] += 1
        done += block
        if at < stages - 1 and done * stages >= total * (at + 1):
            at += 1
    return tuple(counts)


def count_in_flight(
    stage: int, *, stages: int, chunks: int, micro_batches: Number, group: Number = 0
) -> tuple[Number, ...]:
    """Forwards of each chunk whose backward has not begun, when the stage holds the most.

    One chunk: stages - stage of 1F1B. More: 2 (stages - stage - 1) + (chunks - 1) x group warm-up
    forwards and one more, dealt to the chunks in groups of `group` (0: as many as stages): a group
    of the first chunk, one of the second, … The last group is as short as what is left.
    """
    if chunks == 1:
        return (smaller(stages - stage, micro_batches),)
    group = stages if type(group) is int and not group else group
    total = micro_batches * chunks
    ahead = smaller((stages - stage - 1) * 2 + (chunks - 1) * group + 1, total)
    laps, rest = ahead // (group * chunks), ahead % (group * chunks)
    left = smaller(group, micro_batches - laps * group)
    return tuple(
        laps * group + smaller(larger(rest - chunk * left, 0), left) for chunk in range(chunks)
    )
