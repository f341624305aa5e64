"""Sharded parameters filled from whole values: each rank keeps the rows that are its own."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is one rank's part of a larger one."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """The part that this rank holds, without FSDP2's padding; all of a plain tensor."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Of each dimension, what this rank holds.

    FSDP2 cuts as `torch.chunk` does, and of a weight that tp ranks share, the part that is theirs:
    its axis comes before theirs in the mesh, so the last axis cuts first.
    """
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    if is_sharded(tensor):
        held = cast(Any, tensor)
        for axis, placement in reversed(list(enumerate(held.placements))):
            if hasattr(placement, "dim"):
                dim, place = placement.dim, held.device_mesh.get_local_rank(axis)
                each = -(-sizes[dim] // held.device_mesh.size(axis))
                before = min(place * each, sizes[dim])
                starts[dim] += before
                sizes[dim] = min(each, sizes[dim] - before)
    return tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))


def sharers(model: nn.Module) -> int:
    """The ranks that share each product of a model; 1 of one that is not cut so."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return int(mesh.size(names.index("tp"))) if mesh is not None and "tp" in names else 1
    return 1


def shard_number(tensor: Tensor) -> int:
    """Which shard of its tensor this rank holds; copies of one have the same number."""
    held, number = cast(Any, tensor), 0
    for axis, placement in enumerate(held.placements):
        if hasattr(placement, "dim"):
            mesh = held.device_mesh
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that ranks share, on each of them; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    found: Tensor = cast(Any, tensor).full_tensor()
    return found


@contextmanager
def whole(
    module: nn.Module, *, children: bool = True, only: Container[str] | None = None
) -> Iterator[None]:
    """Each sharded parameter of `module` is an empty whole one meanwhile; what is put into it
    stays in this rank's rows. A module without shards is left alone.

    children: theirs, too. only: parameters of these names alone; all others keep their values.
    """
    import torch

    sharded = {
        (child, name): parameter
        for child in (module.modules() if children else (module,))
        for name, parameter in child._parameters.items()
        if parameter is not None and is_sharded(parameter) and (only is None or name in only)
    }
    made: dict[int, nn.Parameter] = {}  # ties kept
    for (child, name), old in sharded.items():
        if id(old) not in made:
            local = local_part(old)
            dense = torch.empty(old.shape, dtype=old.dtype, device=local.device)
            made[id(old)] = torch.nn.Parameter(dense, requires_grad=False)
            del local, dense
        child._parameters[name] = made[id(old)]
    try:
        yield
    finally:
        with torch.no_grad():
            for (child, name), old in sharded.items():
                child._parameters[name] = old
                if (dense_one := made.pop(id(old), None)) is not None:
                    local_part(old).copy_(dense_one[own_part(old)])
                    del dense_one
