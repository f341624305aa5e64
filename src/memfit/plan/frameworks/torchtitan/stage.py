"""torchtitan's pipelines: which blocks a rank holds, how many micro-batches, which of the weights.

All numbers are of one recipe, or arrays of many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memfit.core.errors import MemoryUnknown
from memfit.plan.frameworks import (
    Job,
)  # fmt: skip
from memfit.plan.frameworks.shared.fsdp import Unit
from memfit.plan.frameworks.shared.pipeline import count_in_flight, deal_sizes
from memfit.plan.step_time.arrays import Number, larger, where
from memfit.records import Record
from memfit.records.model import Model

ENDS_APART = 202507  # embedding, and norm with head, are units of their own (#1094)


class Stage(NamedTuple):
    """What a pipeline rank holds."""

    blocks: tuple[int, ...]  # in each of its pieces of the model
    in_flight: tuple[Number, ...]  # micro-batches of each piece that wait for their backward
    first: bool
    last: bool


class Count(Record, frozen=True, kw_only=True):
    """The same in numbers."""

    blocks: Number
    pieces: Number
    flights: Number  # micro-batches in flight of all pieces
    early: Number  # of them, those of the first piece
    waiting: Number  # blocks that keep what their backward needs, of all flights
    first: Number
    last: bool


class Elements(NamedTuple):
    """Elements of a model's parts."""

    block: int
    embedding: int
    head: int  # 0 where the embedding's weights serve
    norm: int


def count_elements(model: Model) -> Elements:
    """Elements of a block (all alike), the embedding, the head and the final norm."""
    sums = {"embedding": 0, "head": 0, "norm": 0}
    block = 0
    for weight in model.weights:
        if weight.layer == 0:
            block += weight.numel
        elif weight.layer < 0:
            sums[weight.part] += weight.numel
    return Elements(block, sums["embedding"], sums["head"], sums["norm"])


def find_stage(job: Job, rank: int) -> Stage:
    """Blocks of a pipeline rank: equal pieces, the first and the last without the remainder.

    From `generate_split_points`: the remainder goes to the middle pieces, one block each.
    """
    p = job.recipe.parallel
    layers, pieces = job.model.architecture.layers, p.pp * p.virtual_pp
    each, more = divmod(layers, pieces)
    sizes = [each + (0 < i <= more) for i in range(pieces)]
    sizes[-1] = layers - sum(sizes[:-1])
    mine = deal_sizes(sizes, p.pp)[rank]
    return Stage(
        blocks=tuple(len(piece) for piece in mine),
        in_flight=_find_flights(job, rank) if p.pp > 1 else (1,),
        first=rank == 0,
        last=rank == p.pp - 1,
    )


def _find_flights(job: Job, rank: int) -> tuple[Number, ...]:
    """Micro-batches in flight of each piece; GPipe's are all of them."""
    p, micro = job.recipe.parallel, job.recipe.accumulation
    if job.option("pipeline_schedule") == "GPipe":
        return (micro,)
    return count_in_flight(
        rank, stages=p.pp, chunks=p.virtual_pp, micro_batches=micro, group=find_round(job)
    )


def find_round(job: Job) -> Number:
    """Micro-batches of a piece in a row, where ranks hold several."""
    micro = job.recipe.accumulation
    return micro // larger(1, micro // job.recipe.parallel.pp)


def leave_alike(stages: Iterable[Stage]) -> list[Stage]:
    """The first of all stages that hold the same: later ones have no more in flight.

    What waits to be received grows as less is in flight, by no more than that: together they are
    as many.
    """
    found: dict[object, Stage] = {}
    for stage in stages:
        found.setdefault((stage.blocks, stage.first, stage.last), stage)
    return list(found.values())


def count_stage(stage: Stage) -> Count:
    """A stage in numbers."""
    return Count(
        blocks=sum(stage.blocks),
        pieces=len(stage.blocks),
        flights=sum(stage.in_flight),
        early=stage.in_flight[0],
        waiting=sum(n * m for n, m in zip(stage.blocks, stage.in_flight, strict=True)),
        first=stage.first,
        last=stage.last,
    )


class Share(NamedTuple):
    """Elements of a rank under tensor parallelism."""

    block: Number  # of one block
    embedding: Number  # 0 where another rank has it
    head: Number  # with the final norm; 0 where another rank has it
    all: Number  # that the rank's data-parallel group holds together


def cut(job: Job, e: Elements, count: Count) -> Share:
    """Elements of a rank; a tied head of a pipeline is a copy on the last one."""
    p = job.recipe.parallel
    block, embedding = e.block // p.tp, where(count.first, e.embedding // p.tp, 0)
    head: Number = 0
    if count.last:
        head = ((e.head or where(p.pp > 1, e.embedding, 0)) + e.norm) // p.tp
    return Share(block, embedding, head, count.blocks * block + embedding + head)


def units(job: Job, share: Share, count: Count) -> tuple[Unit, ...]:
    """`apply_fsdp`'s units in forward order; a pipeline keeps all of them whole."""
    pipeline = job.recipe.parallel.pp > 1
    if job.option("version") >= ENDS_APART:  # type: ignore[operator]
        blocks = Unit(share.block, pipeline, count.blocks)
        return (Unit(share.embedding, pipeline), blocks, Unit(share.head, True))
    # the last block is gathered again at once, and the root stays whole
    blocks = Unit(share.block, pipeline, count.blocks - 1)
    return (Unit(share.embedding + share.head, True), blocks, Unit(share.block, True))


def refuse_zero_bubble(job: Job) -> None:
    """Raise MemoryUnknown for schedules that part the backward in two."""
    schedule = str(job.option("pipeline_schedule"))
    if "ZeroBubble" in schedule or schedule.startswith("ZB"):
        raise MemoryUnknown(
            f"`options.pipeline_schedule: {schedule}`: what the weights' backward waits with is not"
            " described"
        )
