"""Megatron-LM's memory for many recipes at once: blocks and stages once for all that share them."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import structs

from memfit.plan.clock.arrays import larger
from memfit.plan.columns import find_distinct, pick, take
from memfit.plan.frameworks import Job, Peaks
from memfit.plan.frameworks._megatron_shape import Shape, read_shape, read_shards
from memfit.plan.frameworks._megatron_split import SPLIT_KNOBS, deal_stages
from memfit.plan.frameworks._megatron_stage import (
    Block,
    Blocks,
    Count,
    Settings,
    count_stage,
    describe_instants,
    find_flights,
    leave_alike,
    read_blocks,
)
from memfit.plan.frameworks.megatron import pick_stages, read_settings

ROWS = 2**15  # candidates at a time: their columns stay in the processor's cache


class Slot(NamedTuple):
    """One stage of every kind of pipeline: the last, or one of the others that differ."""

    counts: Count  # arrays, one element a kind of pipeline
    present: Any  # whether a pipeline has such a stage


def measure(job: Job) -> Peaks:
    """See `Framework.measure`."""
    import numpy

    recipe, settings = job.recipe, read_settings(job)
    p = recipe.parallel
    one_of, block_of = find_distinct([recipe.micro_batch, p.tp, p.sequence_parallel, p.cp, p.ep])
    few = structs.replace(job, recipe=take(recipe, one_of))
    shape = read_shape(few)
    blocks = _summed(read_blocks(shape, settings))
    slots, pipeline_of = _count_pipelines(job, shape, settings)
    shards = read_shards(job)
    length = max(len(block_of), len(pipeline_of))
    peak = numpy.zeros(length, numpy.int64)
    for start in range(0, length, ROWS):
        part = slice(start, min(start + ROWS, length))
        for slot in slots:
            present = slot.present[pipeline_of[part]]
            rows = numpy.flatnonzero(present) + start
            if not len(rows):
                continue
            cut = take(shards, rows)
            own = structs.replace(take(shape, block_of[rows]), shards=cut[0], expert_shards=cut[1])
            count = take(slot.counts, pipeline_of[rows])
            instants = describe_instants(own, settings, take(blocks, block_of[rows]), count)
            for held in instants.values():
                total = sum(nbytes for nbytes, _ in held.values())
                peak[rows] = larger(peak[rows], total)
    return Peaks(allocated=peak, peak=peak)


def _summed(blocks: Blocks) -> Blocks:
    """The same with what a block keeps as one sum."""

    def summed(block: Block) -> Block:
        return structs.replace(block, saved={"all": block.total})

    sparse = None if blocks.sparse is None else summed(blocks.sparse)
    return structs.replace(blocks, plain=summed(blocks.plain), sparse=sparse)


def _count_pipelines(job: Job, shape: Shape, settings: Settings) -> tuple[list[Slot], Any]:
    """The stages of all kinds of pipeline, and of which kind each candidate is.

    A kind: the split of the blocks, the micro-batches, and the blocks that are recomputed.
    """
    recipe, p = job.recipe, job.recipe.parallel
    split = [p.pp, p.virtual_pp, *(recipe.options[name] for name in SPLIT_KNOBS)]
    one_of, kind_of = find_distinct([*split, recipe.accumulation, recipe.recompute_blocks])
    kinds = structs.replace(job, recipe=take(recipe, one_of))
    firsts, split_of = find_distinct([take(column, one_of) for column in split])
    slots: list[Slot] = []
    for number, first in enumerate(firsts):
        rows = (split_of == number).nonzero()[0]
        one = structs.replace(kinds, recipe=pick(kinds.recipe, first))
        mesh = one.recipe.parallel
        own = structs.replace(shape, pp=mesh.pp, chunks=mesh.virtual_pp)
        stages = leave_alike(own, pick_stages(one, deal_stages(one, own)))
        own = structs.replace(own, micro_batches=take(kinds.recipe.accumulation, rows))
        again = take(kinds.recipe.recompute_blocks, rows)
        how = structs.replace(settings, recomputed_blocks=again)
        place = 1
        for stage in stages:
            count = count_stage(own, how, stage, find_flights(own, how, stage))
            _put(slots, 0 if stage.last else place, rows, count, len(one_of))
            place += not stage.last
    return slots, kind_of


def _put(slots: list[Slot], place: int, rows: Any, count: Count, kinds: int) -> None:
    import numpy

    while len(slots) <= place:
        arrays: dict[str, Any] = {
            name: numpy.zeros(kinds, numpy.int64) for name in Count.__struct_fields__
        }
        arrays["last"] = not slots
        slots.append(Slot(Count(**arrays), numpy.zeros(kinds, bool)))
    slot = slots[place]
    for name in Count.__struct_fields__:
        if name != "last":
            getattr(slot.counts, name)[rows] = getattr(count, name)
    slot.present[rows] = True
