"""Training on many ranks with torch's own sharding (FSDP2; Zhao et al. 2304.11277), each product
shared by ranks within it where `tp` says so (`tensor`).

Sharding, gathering and reducing are torch's; this package only says what is one unit of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from memfit.core.errors import InvalidRequest
from memfit.parallelism.experts import deal, experts_of
from memfit.parallelism.tensor import split_products
from memfit.records.recipe import Parallel, Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

R = TypeVar("R")


def make_mesh(parallel: Parallel, device_type: str) -> DeviceMesh:
    """The mesh (pp, dp_replicate, dp_shard, tp), without the axes of one rank, but for dp_shard.

    Raises InvalidRequest unless a process group of that many ranks exists.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks != parallel.world:
        raise InvalidRequest(
            f"`parallel` names {parallel.world} ranks, and this process is one of {ranks}",
            hint="start as many processes, each with its process group, before building the model",
        )
    axes = {
        "pp": parallel.pp, "dp_replicate": parallel.dp_replicate, "dp_shard": parallel.shards,
    }  # fmt: skip
    for name in ("pp", "dp_replicate"):
        if axes[name] == 1:
            del axes[name]
    if parallel.tp > 1:
        axes["tp"] = parallel.tp
        # which warns that what two axes cut is gathered one after the other: so it is
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with _disable_current_modes():  # a mesh is a table of real integers
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def shard(
    root: nn.Module,
    embedding: nn.Module,
    blocks: Sequence[nn.Module],
    tail: Sequence[nn.Module],
    recipe: Recipe,
    mesh: DeviceMesh,
) -> None:
    """Make the embedding, each block, and the tail (final norm and head) units of FSDP2, in place.

    These are torchtitan's units (torchtitan/models/llama3/infra/parallelize.py, `apply_fsdp`).
    With units of their own the embedding's weights are gone while the blocks run, and the head's
    gradient is reduced before the blocks' backward instead of being held through it. The tail is
    not resharded after the forward: backward begins with it. A head tied to the embedding cannot
    be in another unit than the embedding; both then stay in the root's, which is gathered once.

    Gradients are summed, not averaged, because each rank divides its loss by the target tokens
    of the whole global batch. They are reduced in every micro-batch: to skip that, each rank
    would hold unsharded gradients of the whole model.

    Products that tp ranks share are cut first, and FSDP2 cuts what each has of them. So are experts
    that are dealt to ranks: those of a layer are a unit within their block, on a mesh of their own.

    Under `bf16-mixed` the gathered weights are bf16, gradients are reduced in fp32, and the shards
    are fp32 master copies; nothing is autocast.

    Under `offload: parameters` the shards wait in the host's memory, where their gradients come
    and the optimizer updates them; a unit's are copied to the device each time it is gathered.
    """
    import torch
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
    )

    if recipe.parallel.tp > 1:
        split_products(embedding, blocks, tail, mesh["tp"], scores=recipe.scores)
    others = tuple(name for name in mesh.mesh_dim_names or () if name not in ("pp", "tp"))
    mesh = mesh if others == mesh.mesh_dim_names else mesh[others]
    policy = MixedPrecisionPolicy()
    if recipe.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if recipe.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    reshard = recipe.parallel.reshard_after_forward
    shared = {id(p) for p in embedding.parameters()}
    tail = [module for module in tail if any(True for _ in module.parameters())]
    tied = any(id(p) in shared for module in tail for p in module.parameters())
    if not tied and shared:  # of stages, only the first has the embedding, the last the tail
        fully_shard(embedding, reshard_after_forward=reshard, **options)
    if recipe.parallel.ep > 1:  # whose inputs stand where they stood, also where they are cast
        own: dict[str, Any] = {"mesh": deal(blocks, recipe.parallel, mesh.device_type)}
        own["mp_policy"] = replace(policy, cast_forward_inputs=False)
        for experts in experts_of(blocks):
            fully_shard(experts, reshard_after_forward=reshard, **options | own)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    if not tied and tail:
        fully_shard(tail, reshard_after_forward=False, **options)
    fully_shard(root, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def run_as_forward(module: nn.Module, work: Callable[[], R]) -> R:
    """Run `work` as the forward of a module, with the hooks around it that FSDP2 gathers in."""
    module.forward = work
    try:
        out: R = module()
    finally:
        del module.forward
    return out


def let_go(root: nn.Module) -> None:
    """Free gathered weights and put the shards in their place, in all units of FSDP2.

    After a forward without a backward the units that are not resharded (the root, the tail) stay
    gathered, and `named_parameters` would name what is no shard. FSDP2 has also noted the order of
    its forwards, of which a later backward would gather what came before its own.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state: Any = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 on: one or several
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    group._post_forward_indices.clear()


def clip_sharded(
    parameters: Sequence[nn.Parameter], clip_norm: float, stages: Any = None
) -> Tensor:
    """Scale the gradients of all ranks to at most this norm; returns their norm before, 0-dim.

    stages: the process group of the ranks that hold other stages.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.utils import clip_grads_with_norm_

    meshes: dict[Any, list[nn.Parameter]] = {}  # experts that are dealt have one of their own
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norm, *others = (_norm(own) for own in meshes.values())
    if others:
        norm = torch.linalg.vector_norm(torch.stack((norm, *others)))
    if stages is not None:
        norm = norm.square()
        dist.all_reduce(norm, group=stages)
        norm = norm.sqrt_()
    for own in meshes.values():
        clip_grads_with_norm_(own, clip_norm, norm, foreach=True)
    return norm


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Of the whole gradients of parameters that this rank has shards of, on one mesh."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import get_total_norm

    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def materialise(old: Tensor, device: Any) -> Tensor:
    """Empty storage for a rank's shard of a parameter that `shard` cut on the meta device."""
    import torch

    if not hasattr(old, "to_local"):  # whole: on one device
        return torch.empty(old.shape, dtype=old.dtype, device=device)
    from torch.distributed.tensor import DTensor

    assert isinstance(old, DTensor)
    if torch.device(device).type != old.device_mesh.device_type:  # where `from_local` would move it
        return torch.empty_like(old, device=device)
    local = old.to_local()
    return DTensor.from_local(
        torch.empty(local.shape, dtype=old.dtype, device=device),
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )
