"""What a rank holds while the model's files are gathered from the shards of all ranks.

Every rank gathers every weight, one at a time and in the same order, as `train.checkpoint.export`
does: first over the ranks among which FSDP2 cuts, then over those that share matrix products
(DTensor's `full_tensor`, torch/distributed/tensor/placement_types.py, 2.13). A weight of another
stage is received whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from memfit.parallelism.experts import is_expert
from memfit.parallelism.pipeline import owner_of
from memfit.parallelism.shards import held_shape
from memfit.parallelism.tensor import cut, cut_dim
from memfit.records.model import DTYPE_BYTES, Model, Weight
from memfit.records.recipe import Recipe


def gather_chains(model: Model, recipe: Recipe, rank: int) -> Iterator[list[int]]:
    """For each weight of the files, the bytes of the tensors that gathering it makes, in order.

    Each tensor is made from the one before it, which is freed then. model: after its adapter,
    before any cut. Nothing on one device, whose files are written from the tensors as they are.
    """
    parallel = recipe.parallel
    if parallel.world == 1:
        return
    place, layers = parallel.stage_place(rank), model.architecture.layers
    for weight in model.weights:
        if recipe.adapted and not weight.trainable:
            continue
        if parallel.pp > 1 and owner_of(weight, layers, parallel) != place:
            yield [prod(weight.shape) * DTYPE_BYTES[weight.dtype]]
        else:
            yield _gather(weight, recipe, rank)


def highest_gather(model: Model, recipe: Recipe, rank: int) -> list[int]:
    """The bytes of the tensors that are alive at the highest instant of the gathers."""
    instants = (
        chain[i : i + 2]
        for chain in gather_chains(model, recipe, rank)
        for i in range(max(1, len(chain) - 1))
    )
    return max(instants, key=sum, default=[])


def _gather(weight: Weight, recipe: Recipe, rank: int) -> list[int]:
    """The chain of one weight of this rank's stage; ranks are gathered along dimension 0."""
    parallel, each = recipe.parallel, DTYPE_BYTES[weight.dtype]
    if parallel.ep > 1 and is_expert(weight.name):  # which divide evenly, over both their axes
        whole = prod(weight.shape) * each
        return [whole // parallel.ep, whole] if parallel.expert_shards > 1 else [whole]
    shared = cut(weight.name, weight.shape, parallel.tp)
    chain: list[int] = []
    if parallel.shards > 1:
        rows = -(-shared[0] // parallel.shards)
        padded = rows * prod(shared[1:]) * each
        if held_shape(weight, parallel, rank)[0] < rows:
            chain.append(padded)
        chain.append(padded * parallel.shards)
    dim = cut_dim(weight.name)
    if parallel.tp > 1 and dim is not None:
        if dim:  # a copy with this dimension first
            chain.append(prod(shared) * each)
        chain.append(prod(weight.shape) * each)
    return chain
