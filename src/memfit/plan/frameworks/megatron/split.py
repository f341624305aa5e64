"""How Megatron-LM deals a model's blocks to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import Job, Split
from memfit.plan.frameworks.megatron.shape import Shape
from memfit.plan.frameworks.megatron.stage import Stage, leave_alike
from memfit.plan.frameworks.shared.pipeline import deal_blocks, deal_sizes
from memfit.records.model import Experts
from memfit.records.recipe import Option

Dealt = tuple[tuple[range, ...], ...]  # blocks of each chunk of each stage
FIRST = "decoder_first_pipeline_num_layers"
LAST = "decoder_last_pipeline_num_layers"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
SPLIT_KNOBS = (FIRST, LAST, EMBEDDING, LOSS)


def deal_stages(job: Job, shape: Shape) -> list[Stage]:
    """The blocks of each stage, by Megatron's rules; raises InvalidRequest for a bad split."""
    dealt = _deal(job.recipe.options, shape.layers, shape.mesh.pp, shape.mesh.chunks)
    if _blocks(dealt) != shape.layers:
        raise InvalidRequest(
            f"{shape.layers} blocks of `{job.model.name}` do not divide among {shape.mesh.pp}"
            f" stages of {shape.mesh.chunks} chunks",
            hint="`options.decoder_first_pipeline_num_layers` makes the first stage another size",
        )
    return _name(dealt)


def _name(dealt: Dealt) -> list[Stage]:
    return [
        Stage(index=i, chunks=chunks, first=i == 0, last=i == len(dealt) - 1)
        for i, chunks in enumerate(dealt)
    ]


def pick_stages(which: str, stages: list[Stage]) -> list[Stage]:
    """Return the stages that `options.rank` selects: all, the first or the last."""
    if which == "fullest":
        return stages
    return stages[:1] if which == "first" else stages[-1:]


@lru_cache(maxsize=4096)
def list_alike(
    experts: Experts, layers: int, pp: int, chunks: int, split: tuple[Option, ...], which: str
) -> list[Stage]:
    """Return the stages that differ; split: values of SPLIT_KNOBS, which: of `options.rank`."""
    options = dict(zip(SPLIT_KNOBS, split, strict=True))
    return leave_alike(experts, pick_stages(which, _name(_deal(options, layers, pp, chunks))))


def _deal(options: Mapping[str, Option], layers: int, pp: int, chunks: int) -> Dealt:
    """The blocks of each chunk of each stage; where the split is a bad one, not of all blocks."""
    first, last = int(options[FIRST]), int(options[LAST])
    embedding, loss = bool(options[EMBEDDING]), bool(options[LOSS])
    pieces = pp * chunks
    if first or last:
        middle = pp - bool(first) - bool(last)
        each = (layers - first - last) // middle if middle else 0
        sizes = [first or each, *[each] * (pp - 2), last or each]
        return deal_sizes([size // chunks for _ in range(chunks) for size in sizes], pp)
    if embedding or loss:
        each = (layers + embedding + loss) // pieces
        sizes = [each] * pieces
        sizes[0] -= embedding
        sizes[-1] -= loss
        return deal_sizes(sizes, pp)
    return deal_blocks(layers // pieces * pieces, pp, chunks)


def _blocks(dealt: Dealt) -> int:
    return sum(len(chunk) for chunks in dealt for chunk in chunks)


def list_splits(job: Job, pp: int) -> list[Split]:
    """Return the ways to deal a model's blocks to `pp` stages; those stated in `options` stay.

    Equal pieces, also where the embedding or the loss counts as a block; where no such split
    exists, a first and a last stage of their own, neither with more blocks than the others.
    """
    layers, own = job.model.architecture.layers, job.recipe.options
    chunks = range(1, (layers + 2) // pp + 1 if pp > 1 else 2)
    if any(own[name] for name in SPLIT_KNOBS):
        return _right_ones(layers, pp, chunks, [{}], own)
    counted = [{EMBEDDING: e, LOSS: t} for e in (False, True) for t in (False, True)]
    even = _right_ones(layers, pp, chunks, counted if pp > 1 else [{}], own)
    if even or pp == 1:
        return even
    most = -(-layers // pp)
    ends = [(n, layers - most * (pp - 2) - n) for n in range(1, most + 1)]
    uneven = [{FIRST: first, LAST: last} for first, last in ends if 0 < last <= most]
    return _right_ones(layers, pp, chunks, uneven, own)


def _right_ones(
    layers: int, pp: int, chunks: range, splits: Sequence[Mapping[str, Option]],
    own: Mapping[str, Option],
) -> list[Split]:  # fmt: skip
    """Of these splits, those that deal out all blocks."""
    found = []
    for count in chunks:
        for options in splits:
            dealt = _deal({**own, **options}, layers, pp, count)
            if _blocks(dealt) == layers:
                longest = max(len(chunk) for each in dealt for chunk in each)
                tail = min(len(each[-1] or each[0]) for each in dealt)
                found.append(Split(pp, count, longest, tail, options))
    return found
