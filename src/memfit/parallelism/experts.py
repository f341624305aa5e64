"""The experts of a layer dealt to `ep` ranks (Lepikhin et al. 2006.16668): which rank holds which,
and where that can be.

The ranks are some of those that FSDP2 cuts a model among, as in torchtitan: `dp_shard` is
(dp_shard / ep) x ep, and the ep ranks of a group are neighbours. Each of them has a part of every
layer's experts, which FSDP2 cuts among the ranks that have the same part; all other weights are cut
among all ranks, and each rank has rows of its own. Tokens go to the ranks of their experts and come
back (`train.distributed.dealt`), gradients of an expert's weights are summed over the ranks that
have it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memfit.parallelism.tensor import OTHERWISE
from memfit.records.model import Architecture
from memfit.records.recipe import Parallel, Recipe

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

MODULE = "mlp.experts"  # of a block: what holds all routed experts of a layer
PARTS, RANKS = "parts_of_experts", "ep"  # axes of the experts' own mesh, beside the copies


@lru_cache(maxsize=16384)  # names of one model's parameters, asked for by every mesh
def is_expert(name: str) -> bool:
    """Whether a weight of this name is one of all routed experts of a layer."""
    return ".experts." in f".{name}"


def dealt_shape(name: str, shape: tuple[int, ...], parallel: Parallel) -> tuple[int, ...]:
    """The shape of what an ep rank has of a weight, before FSDP2 cuts that."""
    if parallel.ep == 1 or not is_expert(name):
        return shape
    return (shape[0] // parallel.ep, *shape[1:])


def why_no_dealt_experts(recipe: Recipe, name: str, a: Architecture) -> tuple[str, str] | None:
    """Why ranks cannot share the experts of a recipe, and what to use; None where they can."""
    parallel, count = recipe.parallel, a.experts.count
    ep, shards = parallel.ep, parallel.dp_shard
    if ep == 1:
        return None
    if not count:
        return (
            f"`parallel.ep: {ep}` divides experts among ranks, and `{name}` has none",
            f"leave `parallel.ep` out, or use {OTHERWISE}",
        )
    for found, instead in _refused(recipe):
        return f"{found}, and `parallel.ep: {ep}` is asked for", instead
    if shards % ep:
        return (
            f"`parallel.ep: {ep}` does not divide `parallel.dp_shard: {shards}`, whose ranks share"
            " the experts",
            f"use `parallel.dp_shard: {-(-shards // ep) * ep}`, or an ep that divides {shards}",
        )
    if count % shards:
        return (
            f"`parallel.ep: {ep}` with `parallel.dp_shard: {shards}` does not divide the {count}"
            f" experts of `{name}`",
            f"use dp_shard in {find_degrees(a)}, and `parallel.dp_replicate` for the other ranks",
        )
    return None


def find_degrees(a: Architecture) -> list[int]:
    """Every number of ranks that can share the experts of each layer evenly."""
    count = a.experts.count
    return [n for n in range(1, count + 1) if count % n == 0]


def _refused(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What of a recipe is not built for such ranks, and what to use instead."""
    parallel = recipe.parallel
    for axis in ("tp", "cp", "pp"):
        if (ranks := getattr(parallel, axis)) > 1:
            yield (
                f"`parallel.{axis}: {ranks}` is not built beside expert parallelism",
                f"use `parallel.{axis}: 1`, or {OTHERWISE}",
            )
    if recipe.coding:
        problem = f"`base_format: {recipe.base_format}` is not built for experts of other ranks"
        yield problem, f"use a base in 16 or 32 bits, or {OTHERWISE}"
    if recipe.offload != "none":
        yield f"`offload: {recipe.offload}` is not built for such ranks", "use `offload: none`"


def make_mesh_of_experts(parallel: Parallel, device_type: str) -> DeviceMesh:
    """The mesh (dp_replicate, parts of experts, ep), without the first axis where it has one rank;
    every rank of the process group calls it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    copies, parts = parallel.dp_replicate, parallel.expert_shards
    axes = {"dp_replicate": copies, PARTS: parts, RANKS: parallel.ep}
    if copies == 1:
        del axes["dp_replicate"]
    # which warns that what two axes cut is gathered one after the other: so it is
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with _disable_current_modes():  # a mesh is a table of real integers
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def deal(blocks: Sequence[nn.Module], parallel: Parallel, device_type: str) -> DeviceMesh:
    """Give each ep rank its part of the experts of these blocks, on the meta device, in place.

    Returns the mesh among whose ranks FSDP2 cuts that part. Blocks without experts are left alone.
    """
    mesh = make_mesh_of_experts(parallel, device_type)
    for module in experts_of(blocks):
        _cut(module, mesh[RANKS])
        group: Any = mesh[RANKS].get_group()
        module.group = group
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != RANKS)]


def experts_of(blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The module of routed experts of each block that has one."""
    for block in blocks:
        for name, module in block.named_modules():
            if name.endswith(MODULE):
                yield module


def _cut(module: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn import Parameter

    for name, old in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(old.data, mesh, [Shard(0)], src_data_rank=None)
        setattr(module, name, Parameter(part, requires_grad=old.requires_grad))
