"""Matrices of which each rank has a part, put together for an update that takes them whole.

Rows are cut among FSDP2's ranks, what those have among the ranks of `tp`, by rows or by columns:
the last axis of the mesh cuts first, so it is put together last. `find_gathers` says which buffers
come and go, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
SHARDS, PRODUCTS = "dp_shard", "tp"  # axes of a mesh


def find_gathers(local: Shape, part: Shape, whole: Shape, shards: int) -> tuple[Shape, ...]:
    """The buffers of one matrix, each made of the one before it.

    local: a rank's shard; part: what its tp ranks have together of `whole`; shards: ranks that cut
    a part by its rows.
    """
    found: list[Shape] = []
    rows = -(-part[0] // shards)
    if shards > 1:
        if local[0] < rows:
            found.append((rows, part[1]))
        found.append((rows * shards, part[1]))
    if part != whole:
        found.append((whole[0] * whole[1] // part[1], part[1]))
        if part[1] != whole[1]:
            found.append(whole)
    return tuple(found)


def gather_matrix(local: Tensor, like: Any) -> Tensor:
    """The whole of a matrix that is cut as the DTensor `like`; local: this rank's part of it."""
    shards, tp, dim = _axes(like)
    if shards > 1:
        rows = _part_rows(like)
        each = -(-rows // shards)
        if len(local) < each:
            padded = local.new_zeros(each, local.shape[1])
            padded[: len(local)] = local
            local = padded
            del padded
        joined = local.new_empty(each * shards, local.shape[1])
        _all_gather(joined, local, like.device_mesh.get_group(SHARDS))
        local = joined[:rows]
        del joined
    if dim is not None:
        rows = len(local)
        joined = local.new_empty(tp * rows, local.shape[1])
        _all_gather(joined, local, like.device_mesh.get_group(PRODUCTS))
        local = joined
        del joined
        if dim == 1:
            local = local.view(tp, rows, -1).transpose(0, 1).reshape(rows, -1)
    return local


def _all_gather(joined: Tensor, local: Tensor, group: Any) -> None:
    """By its name from torch 2.13 on, or by the one before."""
    import torch.distributed as dist

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(joined, local, group=group)


def cut_matrix(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of a whole matrix that is cut as the DTensor `like`, as a view."""
    shards, tp, dim = _axes(like)
    mesh = like.device_mesh
    if dim is not None:
        whole = whole.chunk(tp, dim)[mesh.get_local_rank(PRODUCTS)]
    if shards > 1:
        each = -(-len(whole) // shards)
        start = mesh.get_local_rank(SHARDS) * each
        whole = whole[start : start + each]
    return whole


def _axes(like: Any) -> tuple[int, int, int | None]:
    """Ranks that cut by rows, ranks that share products, and what dimension those cut."""
    names = like.device_mesh.mesh_dim_names
    shards = like.device_mesh.size(names.index(SHARDS))
    if PRODUCTS not in names:
        return shards, 1, None
    place = like.placements[names.index(PRODUCTS)]
    dim = cast(int, place.dim) if place.is_shard() else None
    return shards, like.device_mesh.size(names.index(PRODUCTS)), dim


def _part_rows(like: Any) -> int:
    """Rows that this rank's tp ranks have together."""
    _, tp, dim = _axes(like)
    return int(like.shape[0]) // (tp if dim == 0 else 1)
