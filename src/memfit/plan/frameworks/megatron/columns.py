"""Megatron-LM's memory for many recipes at once: blocks and stages once for all that share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from memfit.plan.frameworks import Job, Peaks
from memfit.plan.frameworks.megatron.settings import read_settings
from memfit.plan.frameworks.megatron.shape import Shape, read_shape, read_shards
from memfit.plan.frameworks.megatron.split import SPLIT_KNOBS, list_alike
from memfit.plan.frameworks.megatron.stage import (
    Block,
    Blocks,
    Count,
    Held,
    Settings,
    count_stage,
    describe_instants,
    find_flights,
    read_blocks,
)
from memfit.plan.frameworks.shared.columns import find_distinct, pick, size_of, take
from memfit.plan.frameworks.shared.slots import Slots, find_peaks
from memfit.records.ledger import Phase


def measure(job: Job) -> Peaks:
    """See `Framework.measure`."""
    recipe, settings = job.recipe, read_settings(job)
    p = recipe.parallel
    differ = [recipe.micro_batch, p.tp, p.sequence_parallel, p.cp, p.ep]
    one_of, block_of = find_distinct(differ, size_of(recipe))
    shape = read_shape(structs.replace(job, recipe=take(recipe, one_of)))
    blocks = _summed(read_blocks(shape, settings))
    slots, kind_of = _count_pipelines(job, shape, settings)
    shards = read_shards(job)

    def describe(rows: Any, last: bool, numbers: dict[str, Any]) -> Mapping[Phase, Held]:
        among, among_experts = take(shards, rows)
        of = block_of[rows]
        own = take(shape, of)
        mesh = structs.replace(own.mesh, shards=among, expert_shards=among_experts)
        own = structs.replace(own, mesh=mesh)
        return describe_instants(own, settings, take(blocks, of), Count(last=last, **numbers))

    return find_peaks(slots, kind_of, describe)


def _summed(blocks: Blocks) -> Blocks:
    """The same with what a block keeps as one sum."""

    def summed(block: Block) -> Block:
        return structs.replace(block, saved={"all": block.total})

    sparse = None if blocks.sparse is None else summed(blocks.sparse)
    return structs.replace(blocks, plain=summed(blocks.plain), sparse=sparse)


def _count_pipelines(job: Job, shape: Shape, settings: Settings) -> tuple[Slots, Any]:
    """The stages of all kinds of pipeline, and of which kind each candidate is.

    A kind: the split of the blocks, the micro-batches, and the blocks that are recomputed.
    """
    recipe, p = job.recipe, job.recipe.parallel
    split = [p.pp, p.virtual_pp, *(recipe.options[name] for name in SPLIT_KNOBS)]
    one_of, kind_of = find_distinct(
        [*split, recipe.accumulation, recipe.recompute_blocks], size_of(recipe)
    )
    kinds = structs.replace(job, recipe=take(recipe, one_of))
    firsts, split_of = find_distinct([take(column, one_of) for column in split], len(one_of))
    slots = Slots(len(one_of))
    for number, first in enumerate(firsts):
        rows = (split_of == number).nonzero()[0]
        pp, chunks, *dealt = (pick(take(column, one_of), first) for column in split)
        stages = list_alike(
            shape.experts, shape.layers, pp, chunks, tuple(dealt), str(job.option("rank"))
        )
        micro_batches = take(kinds.recipe.accumulation, rows)
        own = structs.replace(
            shape,
            mesh=structs.replace(shape.mesh, pp=pp, chunks=chunks),
            rows=structs.replace(shape.rows, micro_batches=micro_batches),
        )
        recomputed = take(kinds.recipe.recompute_blocks, rows)
        how = structs.replace(settings, recomputed_blocks=recomputed)
        place = 1
        for stage in stages:
            count = count_stage(own, how, stage, find_flights(own, how, stage))
            slots.put(0 if stage.last else place, rows, count)
            place += not stage.last
    return slots, kind_of
