"""How memfit's own step lies over many devices: the meshes that a request allows."""

from __future__ import annotations

from math import isqrt

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.objectives import find_objective
from memfit.parallelism.limits import check_method
from memfit.records.model import Architecture
from memfit.records.recipe import Parallel
from memfit.records.request import Request

MOST_SHARED = 1024  # ranks of a product: no model on record has more attention heads
LEAST_SHARE = 1024  # tokens of a sequence that a cp rank keeps, where the request leaves it open


def list_meshes(request: Request) -> tuple[Parallel, ...]:
    """Return the meshes to choose from: the stated one; else what FSDP2 can make of all devices.

    Weights cut among all ranks or among those of a node, of which the nodes hold copies, resharded
    after the forward or not; or whole on every rank (DDP). A global batch of fewer rows than there
    are devices leaves the meshes of `list_shared`. Raises InvalidRequest where the stated mesh is
    not of as many ranks as there are devices, or no mesh can divide the global batch.
    """
    if request.parallel != "auto":
        found: tuple[Parallel, ...] = (stated_mesh(request),)
    elif request.devices == 1:
        return (Parallel(),)
    else:
        whole = request.devices
        shards = dict.fromkeys((whole, request.hardware.count)) if whole > 1 else {}
        found = tuple(
            Parallel(dp_replicate=whole // n, dp_shard=n, reshard_after_forward=gives_up)
            for n in shards
            if n > 1
            for gives_up in (True, False)
        )
        if request.offload != "parameters":  # which has FSDP2's shards on the host
            found = (*found, Parallel(dp_replicate=whole))
        if not divides(request, found[0]) and (shared := list_shared(request)):
            return shared
    check_batch(request, found[0])
    return found


def list_shared(request: Request) -> tuple[Parallel, ...]:
    """The meshes whose ranks share products within a machine, where the request leaves it open."""
    if request.parallel != "auto" or find_objective(request.task.objective).samples:
        return ()
    count, whole = request.hardware.count, request.devices
    found = (
        Parallel(dp_shard=whole // tp, tp=tp, sequence_parallel=True)
        for tp in range(2, min(count, MOST_SHARED) + 1)
        if count % tp == 0
    )
    return tuple(mesh for mesh in found if divides(request, mesh))


def list_divided(request: Request, length: int) -> tuple[Parallel, ...]:
    """The meshes beside those of `list_shared` that divide more than weights among ranks, where the
    request leaves it open: the tokens of rows within a machine, or the blocks, a stage a rank.

    length: tokens of a row. Whether a recipe can have such a mesh is not checked here.
    """
    if request.parallel != "auto" or find_objective(request.task.objective).samples:
        return ()
    count, whole = request.hardware.count, request.devices
    rows = [
        Parallel(dp_shard=whole // cp, cp=cp)
        for cp in range(2, min(count, length // LEAST_SHARE) + 1)
        if count % cp == 0
    ]
    stages = [
        Parallel(dp_shard=whole // pp, pp=pp)
        for pp in range(2, min(whole, MOST_SHARED) + 1)
        if whole % pp == 0
    ]
    return tuple(mesh for mesh in (*rows, *stages) if divides(request, mesh))


def list_dealt(request: Request, a: Architecture) -> tuple[Parallel, ...]:
    """The meshes whose ranks are dealt a mixture's experts, within a machine or over all, where the
    request leaves it open. Whether a recipe can have such a mesh is not checked here.
    """
    count, whole = a.experts.count, request.devices
    if request.parallel != "auto" or not count:
        return ()
    found = (
        Parallel(dp_replicate=whole // shards, dp_shard=shards, ep=ep)
        for shards in dict.fromkeys((whole, request.hardware.count))
        if count % shards == 0
        for ep in divisors(shards)[1:]
    )
    return tuple(mesh for mesh in found if divides(request, mesh))


def stated_mesh(request: Request) -> Parallel:
    """Return the stated mesh, of as many ranks as there are devices; by default all are shards."""
    devices, hardware = request.devices, request.hardware
    if request.parallel == "auto":
        return Parallel(dp_shard=devices)
    stated = request.parallel
    if stated.world != devices:
        raise InvalidRequest(
            f"`parallel` names {stated.world} ranks ({_factors(stated)}), but"
            f" `hardware` has `count: {hardware.count}` x `nodes: {hardware.nodes}` devices",
            hint=match_devices(stated.world, devices),
        )
    return replace(stated, sequence_parallel=stated.tp > 1)


def match_devices(ranks: int, devices: int) -> str:
    """The hint where a mesh has another number of ranks than there are devices."""
    return (
        f"one rank a device: name {ranks} devices, as `hardware.count: {ranks}`, or a mesh of"
        f" {devices}, as `parallel.dp_shard: {devices}` with the other axes, or leave `parallel`"
        " open"
    )


def _factors(parallel: Parallel) -> str:
    shared = (n for n in (parallel.cp, parallel.tp, parallel.pp) if n > 1)
    axes = (parallel.dp_replicate, parallel.dp_shard, *shared)
    return " x ".join(map(str, axes))


def check_described(request: Request) -> None:
    """Raise InvalidRequest for what many ranks can do and no prediction describes yet."""
    check_method(request.method, request.precision, request.ranks)
    if request.ranks > 1 and request.offload == "activations":
        raise InvalidRequest(
            f"`offload: activations` on {request.ranks} devices is not predicted yet",
            hint="`memfit certify REQUEST` proves its memory; or plan it for one device",
        )


def check_batch(request: Request, parallel: Parallel) -> None:
    """Raise InvalidRequest where the ranks' micro-batches do not make up the global batch."""
    if parallel.world == 1:
        return  # said in the words of one device
    if not divides(request, parallel):
        micro = request.least_rows
        batch, each = request.global_batch, parallel.dp * micro
        raise InvalidRequest(
            f"`task.global_batch: {batch}` is not a multiple of {each}: {parallel.dp} ranks x"
            f" `micro_batch: {micro}`",
            hint=f"use `global_batch: {-(-batch // each) * each}`, or fewer ranks",
        )


def divides(request: Request, parallel: Parallel) -> bool:
    """Whether the ranks' micro-batches make up the global batch."""
    return request.global_batch % (parallel.dp * request.least_rows) == 0


def describe_mesh(parallel: Parallel) -> str:
    """Return a mesh in a line: `8 shards`, `2 copies x 8 shards`, `2 stages x 4 shards`."""
    copies = f"{parallel.dp_replicate} copies" if parallel.dp_replicate > 1 else ""
    shards = f"{parallel.dp_shard} shards" if parallel.dp_shard > 1 else ""
    tokens = f"{parallel.cp} to a row" if parallel.cp > 1 else ""
    products = f"{parallel.tp} to a product" if parallel.tp > 1 else ""
    experts = f" (experts on {parallel.ep})" if parallel.ep > 1 else ""
    shards += experts
    stages = f"{parallel.stages} stages" if parallel.pp > 1 else ""
    stages += f" on {parallel.pp} ranks" if parallel.virtual_pp > 1 else ""
    suffix = "" if parallel.reshard_after_forward or parallel.shards == 1 else ", kept gathered"
    found = (stages, copies, shards, tokens, products)
    return " x ".join(part for part in found if part) + suffix


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending: the sizes that an axis of n ranks may have."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return [*low, *(n // d for d in reversed(low) if d * d != n)]
