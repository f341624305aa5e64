"""Gloo's own copies, which no GPU's backend makes, taken out of a count of live bytes.

Gloo reduces a copy of its input, which is split and dropped when it is waited for; its thread
lets go of a collective's tensors some time after it is over; and what it has sent stays as long as
the handle of the sending. NCCL does none of it, and what a certificate traces does not either.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from memfit.train.measure.live import LiveBytes

# those that FSDP2 calls, by their names in any torch from 2.11; that stages hand weights on by, and
# rows to experts
COLLECTIVES = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
    "reduce_scatter_tensor", "all_reduce", "broadcast", "all_to_all_single",
)  # fmt: skip
# that DTensor calls (norms, whole weights, shared rows) and torch's ring (keys, values and their
# gradients)
FUNCTIONAL = (
    "all_reduce", "all_gather_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "permute_tensor",
)  # fmt: skip
# seconds that gloo's thread is given to let go of a tensor: where a machine has much other work
# it may not run for some, and a buffer that it still holds would count as alive in what follows
LONGEST = 60.0


@contextmanager
def without_gloo(live: LiveBytes) -> Iterator[None]:
    """Count as if the backend held nothing; slower, so only around what is counted."""
    if not (dist.is_initialized() and dist.get_backend() == "gloo"):
        yield
        return
    import torch.distributed._functional_collectives as funcol

    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    direct = {name: getattr(funcol, name) for name in FUNCTIONAL if hasattr(funcol, name)}
    plain_wait = dist.Work.wait

    def collective(plain: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            before = [_users(tensor) for tensor in tensors]
            out = plain(*args, **kwargs)
            if isinstance(out, dist.Work):  # it holds them itself until its caller drops it
                wait(out)
                return out
            _wait_until_let_go(tensors, before)
            return out

        return run

    def wait(*args: Any) -> Any:
        with live.hidden():
            return plain_wait(*args)

    def functional(plain: Any) -> Any:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = _users(tensor)
            out = plain(tensor, *args, **kwargs)
            elem = getattr(out, "elem", out)
            funcol.wait_tensor(elem)  # type: ignore[no-untyped-call]
            _wait_until_let_go([tensor, elem], [before, 1])
            return out

        return run

    work: Any = dist.Work
    work.wait = wait
    for name, plain in originals.items():
        setattr(dist, name, collective(plain))
    for name, plain in direct.items():
        setattr(funcol, name, functional(plain))
    try:
        with _copies_sent(live):
            yield
    finally:
        work.wait = plain_wait
        for name, plain in originals.items():
            setattr(dist, name, plain)
        for name, plain in direct.items():
            setattr(funcol, name, plain)


@contextmanager
def _copies_sent(live: LiveBytes) -> Iterator[None]:
    """Send copies: gloo's handle holds the sent tensor as long as torch's schedules hold the
    handle."""
    plain = dist.isend
    modules: Any = (dist, dist.distributed_c10d)  # where schedules, and torch itself, look it up

    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with live.hidden():
            copy = tensor.detach().clone()
        return plain(copy, *args, **kwargs)

    for module in modules:
        module.isend = send
    try:
        yield
    finally:
        for module in modules:
            module.isend = plain


def _users(tensor: Any) -> int:
    return int(tensor._use_count())


def _wait_until_let_go(tensors: Sequence[torch.Tensor], users: Sequence[int]) -> None:
    """Until each has no more users than that, or for `LONGEST` after the collective is over."""
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        if all(_users(t) <= n for t, n in zip(tensors, users, strict=True)):
            return
        time.sleep(1e-5)
    warnings.warn(
        f"gloo holds a collective's tensors {LONGEST:g} s after it: more is counted than is held",
        stacklevel=3,
    )
