"""Updates within backward: each weight as soon as its gradient is whole, which is then let go.

The optimizer is the one that would run after backward, called with one weight at a time, so
that checkpoints, schedules and results are the same; see `optimizers/shared/in_backward.py` for
what cannot be had this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def updating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Every backward inside updates the optimizer's weights, and leaves no gradient of them.

    A weight that several operations use is updated once, when its gradient is summed
    (`register_post_accumulate_grad_hook`). Hooks are gone on leaving, whatever happens.
    """
    whole = optimizer.param_groups
    groups: dict[Tensor, dict[str, Any]] = {p: group for group in whole for p in group["params"]}

    def update(weight: Tensor) -> None:
        optimizer.param_groups = [{**groups[weight], "params": [weight]}]
        optimizer.step()
        weight.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        for p in groups
    ]
    try:
        yield
    finally:
        optimizer.param_groups = whole
        for handle in handles:
            handle.remove()
