"""What a rank holds while the model's files are gathered from the shards of all ranks.

Every rank gathers every weight, one at a time and in the same order, as `train.checkpoint.export`
does, over the ranks among which FSDP2 cuts and over those that share matrix products (DTensor's
`full_tensor`, torch/distributed/tensor/placement_types.py, 2.13). A weight of another stage is
received whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from memfit.families.weight_files.names import file_parts
from memfit.parallelism.experts import is_expert
from memfit.parallelism.pipeline import owner_of
from memfit.parallelism.shards import held_shape
from memfit.parallelism.tensor import cut, cut_dim
from memfit.records.model import DTYPE_BYTES, Model, Weight
from memfit.records.recipe import Recipe

FILE = 5 * 10**9  # bytes that Hugging Face gives a file at most


def gather_chains(model: Model, recipe: Recipe, rank: int) -> Iterator[list[int]]:
    """For each weight of the files, the bytes of the tensors that gathering it makes, in order.

    Each tensor is made from the one before it, which is freed then. model: after its adapter,
    before any cut. Nothing on one device, whose files are written from the tensors as they are.
    """
    return (_chain(weight, model, recipe, rank) for weight in _saved(model, recipe))


def highest_gather(model: Model, recipe: Recipe, rank: int, *, copies: bool) -> list[int]:
    """The bytes of the tensors that are alive at the highest instant of the gathers.

    copies: whether the tensors of a file wait in the same memory until the file is written, as
    they do where a CPU trains and its rank writes.
    """
    instants = _copies(model, recipe, rank) if copies else _gathers(model, recipe, rank)
    return max(instants, key=sum, default=[])


def _gathers(model: Model, recipe: Recipe, rank: int) -> Iterator[list[int]]:
    for gathered in gather_chains(model, recipe, rank):
        yield from _pairs(gathered)


def _pairs(made: list[int]) -> list[list[int]]:
    return [made[i : i + 2] for i in range(max(1, len(made) - 1))]


def _copies(model: Model, recipe: Recipe, rank: int) -> Iterator[list[int]]:
    """The same, with the copies that wait."""
    parts = [_part_bytes(weight, model, recipe) for weight in _saved(model, recipe)]
    chained = [*chain.from_iterable(parts)]
    files = [0] * len(chained) if recipe.adapted else split_files(chained)
    left = Counter(files)
    waiting, number = Counter[int](), 0
    for gathered, sizes in zip(gather_chains(model, recipe, rank), parts, strict=True):
        yield from ([*pair, waiting.total()] for pair in _pairs(gathered))
        for nbytes in sizes:
            file = files[number]
            waiting[file] += nbytes
            yield [*gathered[-1:], waiting.total()]
            left[file] -= 1
            number += 1
            if not left[file]:
                del waiting[file]


def split_files(sizes: Sequence[int], most: int = FILE) -> list[int]:
    """The file of each tensor, as Hugging Face splits them: one that is larger than a file has its
    own (huggingface_hub/serialization/_base.py, split_state_dict_into_shards_factory)."""
    files, made, filling, held = [], 0, 0, 0
    for size in sizes:
        if size > most:
            made += 1
            files.append(made)
            continue
        if not filling or held + size > most:
            made += 1
            filling, held = made, 0
        files.append(filling)
        held += size
    return files


def _saved(model: Model, recipe: Recipe) -> list[Weight]:
    if recipe.parallel.world == 1:
        return []
    return [w for w in model.weights if w.trainable or not recipe.adapted]


def _part_bytes(weight: Weight, model: Model, recipe: Recipe) -> list[int]:
    """Bytes of each tensor of the files that a weight comes to."""
    each, whole = DTYPE_BYTES[weight.dtype], prod(weight.shape)
    if recipe.adapted:
        return [whole * each]
    parts = file_parts(weight.name, weight.shape, model.architecture.family)
    return [prod(part.shape) * each for part in parts]


def _chain(weight: Weight, model: Model, recipe: Recipe, rank: int) -> list[int]:
    """See `gather_chains`; that of another stage's weight is its arrival."""
    parallel = recipe.parallel
    place, layers = parallel.stage_place(rank), model.architecture.layers
    if parallel.pp > 1 and owner_of(weight, layers, parallel) != place:
        return [prod(weight.shape) * DTYPE_BYTES[weight.dtype]]
    return _gather(weight, recipe, rank)


def _gather(weight: Weight, recipe: Recipe, rank: int) -> list[int]:
    """The chain of one weight of this rank's stage; ranks are gathered along dimension 0."""
    parallel, each = recipe.parallel, DTYPE_BYTES[weight.dtype]
    if parallel.ep > 1 and is_expert(weight.name):  # which divide evenly, over both their axes
        whole = prod(weight.shape) * each
        return [whole // parallel.ep, whole] if parallel.expert_shards > 1 else [whole]
    shape, dim = cut(weight.name, weight.shape, parallel.tp), cut_dim(weight.name)
    own, rows = held_shape(weight, parallel, rank)[0], -(-shape[0] // parallel.shards)
    chain: list[int] = []
    if parallel.tp > 1 and dim:  # first gathered along the rows, and these then joined along `dim`
        shape = weight.shape
        chain += [own * prod(shape[1:]) * each] * 2
    if parallel.shards > 1:
        padded = rows * prod(shape[1:]) * each
        if own < rows:
            chain.append(padded)
        chain.append(padded * parallel.shards)
    if parallel.tp > 1 and dim == 0:
        chain.append(prod(weight.shape) * each)
    return chain
