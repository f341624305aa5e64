"""What a byte counter must know of sharded steps: which operators fill which buffers.

FSDP2 gathers and reduces through a few operators of its own, so that the kind of a buffer is read
off the operator that uses it, in a real run and in a trace alike.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from memfit.records.ledger import Kind

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def _out(call: Arguments) -> Any:
    args, kwargs = call
    return kwargs["out"] if "out" in kwargs else args[-1]


# operator -> the arguments that are buffers of a kind, for storages not yet known as another
BUFFERS: dict[str, tuple[tuple[Kind, Callable[[Arguments], Any]], ...]] = {
    "fsdp.all_gather_copy_in.default": (
        (Kind.ALL_GATHER, lambda call: call[0][0]),  # the shards, cast to the dtype gathered in
        (Kind.ALL_GATHER, lambda call: call[0][1]),
    ),
    "fsdp.split_with_sizes_copy.default": ((Kind.ALL_GATHER, _out),),  # the gathered weights
    "fsdp.chunk_cat.default": (
        (Kind.GRADIENTS, lambda call: call[0][0]),  # unsharded, about to be reduced
        (Kind.REDUCE_SCATTER, _out),
    ),
    "c10d._reduce_scatter_base_.default": ((Kind.REDUCE_SCATTER, lambda call: call[0][0]),),
}


def buffers(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Kind, Any]]:
    """(kind, tensor) of every buffer among the arguments of the operator of this name."""
    for kind, find in BUFFERS.get(name, ()):
        found = find((args, kwargs))
        for tensor in found if isinstance(found, list | tuple) else (found,):
            yield kind, tensor


@contextmanager
def propagation(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Call `enter` and `leave` around DTensor's shape propagation, which runs whole operators on

    fake tensors of the global shape: they are nobody's memory.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    owner, name = module.ShardingPropagator, "_propagate_tensor_meta_non_cached"
    plain = getattr(owner, name)

    def hidden(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return plain(*args, **kwargs)
        finally:
            leave()

    setattr(owner, name, hidden)
    try:
        yield
    finally:
        setattr(owner, name, plain)


# Methods that compute with a mesh's table of ranks: `.tolist()` and `.nonzero()` need real numbers,
# and the table is no memory of the step's.
MESH_METHODS = (
    "__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "_get_all_submeshes",
    "get_local_rank", "get_coordinate", "_compute_coordinates_from_mesh",
)  # fmt: skip


@contextmanager
def meshes_outside_modes() -> Iterator[None]:
    """Run what computes with tables of ranks outside fake tensors and counters."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        yield
        return
    owner = module.DeviceMesh
    with ExitStack() as stack:
        for name in MESH_METHODS:
            plain = owner.__dict__.get(name)
            if plain is None:
                continue  # not in this version
            if isinstance(plain, staticmethod | classmethod):
                outside: Any = type(plain)(_outside_modes(plain.__func__))
            else:
                outside = _outside_modes(plain)
            setattr(owner, name, outside)
            stack.callback(setattr, owner, name, plain)
        yield


def _outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils._python_dispatch import _disable_current_modes

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run
