"""What gloo keeps, which no GPU's backend does, taken out of a count of live bytes.

Gloo reduces a copy of its input; its thread lets go of a collective's tensors at some time after it
is over; and what it sends stays as long as the handle of the sending. NCCL does none of it, and
what a certificate traces does not either. So gloo works on copies, which nobody counts, and what
it makes of them is copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.train.measure.live import LiveBytes

# Namespaces of torch's operators that call a backend.
CALLED = ("c10d", "_c10d_functional", "_dtensor")
# What waits calls no backend. What receives writes after it returns, so it keeps its caller's
# tensor; nothing but the handle holds that.
PASSED = (
    "wait_tensor", "_wrap_tensor_autograd", "recv_", "recv_any_source_", "isend", "irecv",
    "batch_p2p_ops",
)  # fmt: skip


@contextmanager
def without_gloo(live: LiveBytes) -> Iterator[None]:
    """Count as if the backend held nothing; slower, so only around what is counted.

    Each collective is over when its call returns.
    """
    if not (dist.is_initialized() and dist.get_backend() == "gloo"):
        yield
        return
    plain_run, plain_wait = live.run, dist.Work.wait

    def wait(*args: Any) -> Any:  # gloo splits the copy that it has reduced, whenever asked
        with live.hidden():
            return plain_wait(*args)

    work: Any = dist.Work
    live.run, work.wait = _run, wait
    try:
        yield
    finally:
        live.run, work.wait = plain_run, plain_wait


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator. One that calls the backend works on copies, and is over when it returns."""
    if func.namespace not in CALLED or func._opname in PASSED:
        return func(*args, **kwargs)
    copies, named = tree_map_only(torch.Tensor, torch.Tensor.clone, (args, dict(kwargs)))
    found = func(*copies, **named)
    if func.namespace != "c10d":
        return _take_functional(func, (args, kwargs), found)
    if func._opname == "send":  # the other rank may ask for it only when this one has gone on
        return found
    for leaf in tree_leaves(found):
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()  # type: ignore[attr-defined]  # c10d's Work
    _fill(args[0], copies[0])
    # what it fills is what it returns, beside its handle
    return (args[0], *found[1:]) if isinstance(found, tuple) else found


def _take_functional(func: Any, call: tuple[Any, Any], found: Any) -> Any:
    """What a functional collective made, waited for: new, or in the tensor that it writes."""
    args, kwargs = call
    waited = tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, found)
    written = kwargs["out"] if "out" in kwargs else args[0] if func._opname[-1] == "_" else None
    if written is None:
        return tree_map_only(torch.Tensor, torch.Tensor.clone, waited)
    _fill(written, waited)
    return written


def _fill(tensors: Any, copies: Any) -> None:
    for tensor, copy in zip(tree_leaves(tensors), tree_leaves(copies), strict=True):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(copy)
