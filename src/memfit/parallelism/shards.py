"""Which part of a weight a rank holds: arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from msgspec.structs import replace

from memfit.parallelism.experts import dealt_shape, is_expert
from memfit.parallelism.pipeline import stage_model
from memfit.parallelism.tensor import cut
from memfit.records.model import Model, Weight
from memfit.records.recipe import Parallel


def local_shape(shape: tuple[int, ...], parallel: Parallel, rank: int) -> tuple[int, ...]:
    """The shape of a rank's shard: FSDP2 cuts dimension 0 as `torch.chunk` does.

    shape: what tp ranks have of a weight that they share (`tensor.cut`). Every shard holds
    ceil(n / shards) rows until none are left: the last ones hold fewer, or none.
    """
    rows = -(-shape[0] // parallel.shards)
    start = shard_index(parallel, rank) * rows
    return (max(0, min(rows, shape[0] - start)), *shape[1:])


def shard_index(parallel: Parallel, rank: int) -> int:
    """A rank's place among those that share one copy of the model; copies are alike."""
    return rank // parallel.tp % parallel.shards


def held_shape(weight: Weight, parallel: Parallel, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part of a weight."""
    shape = _cut(weight, parallel)
    if parallel.ep > 1 and is_expert(weight.name):  # as many for all: they divide evenly
        return (shape[0] // parallel.expert_shards, *shape[1:])
    return local_shape(shape, parallel, rank)


def _cut(weight: Weight, parallel: Parallel) -> tuple[int, ...]:
    """What the ranks that share products, or experts, have of a weight."""
    shape = cut(weight.name, weight.shape, parallel.tp)
    return dealt_shape(weight.name, shape, parallel)


@lru_cache(maxsize=64)
def cut_model(model: Model, parallel: Parallel) -> Model:
    """The model with every weight as large as what tp and ep ranks have of it, before FSDP2 cuts
    that."""
    if parallel.tp == parallel.ep == 1:
        return model
    cuts = (replace(w, shape=_cut(w, parallel)) for w in model.weights)
    return replace(model, weights=tuple(cuts))


@lru_cache(maxsize=64)
def local_model(model: Model, parallel: Parallel, rank: int) -> Model:
    """The model with every weight as large as this rank's shard of it; a quantised one is the
    tensors that hold it.
    """
    if parallel.world == 1:
        return model
    model = stage_model(model, parallel, rank)
    tensors = (t for w in model.weights for t in _tensors(w))
    weights = (replace(t, shape=held_shape(t, parallel, rank)) for t in tensors)
    return replace(model, weights=tuple(weights))


def _tensors(weight: Weight) -> Iterator[Weight]:
    """Return the tensors that hold a weight: several where it is quantised, each sharded alone."""
    if not weight.coding:
        yield weight
        return
    for name, spec in weight.stored.items():
        yield replace(weight, name=name, shape=spec.shape, dtype=spec.dtype, coding="")


def held_bytes(weights: Iterable[Weight], parallel: Parallel, rank: int) -> int:
    """Bytes of a rank's shards of these weights, without the padding that FSDP2 adds."""
    tensors = (t for w in weights for t in _tensors(w))
    shards = (replace(t.spec, shape=held_shape(t, parallel, rank)) for t in tensors)
    return sum(shard.nbytes for shard in shards)


@lru_cache(maxsize=256)  # a search asks of one model and one mesh again and again
def fullest_rank(model: Model, parallel: Parallel) -> tuple[int, str]:
    """The rank that needs the most memory, and why: chosen among the first, the second and the
    last of one copy of the model.

    Every rank runs the same operators on the same batch shapes; only the shards differ. A shard
    never has more rows than the one before it, so the three cover all. Ranks that share products
    are alike. Ties go to the first.
    """
    places = sorted({0, min(1, parallel.dp_shard - 1), parallel.dp_shard - 1})
    candidates = [place * parallel.tp for place in places]
    held = {rank: held_bytes(model.weights, parallel, rank) for rank in candidates}
    fullest = max(candidates, key=lambda rank: held[rank])
    if len(set(held.values())) == 1:
        return fullest, f"rank {fullest} of {parallel.world}: all ranks are alike"
    least = min(held, key=lambda rank: held[rank])
    return fullest, (
        f"rank {fullest} of {parallel.world}, the fullest: it holds {held[fullest]} B of weights,"
        f" rank {least} {held[least]} B"
    )
