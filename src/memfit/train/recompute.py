"""Recomputation of the first n blocks (Chen et al. 1604.06174)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_first(blocks: nn.ModuleList, n: int, *, preserve_rng: bool) -> None:
    """Keep only the input of the first n blocks and run them again in the backward pass.

    The first, not the last: backward reaches them when the other blocks' activations are gone.
    `preserve_rng` is needed with dropout only, and costs a copy of the generator's state a block.
    """
    for block in blocks[:n]:
        _recompute(block, preserve_rng)


def _recompute(block: nn.Module, preserve_rng: bool) -> None:
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return checkpoint(
            plain, *args, use_reentrant=False, preserve_rng_state=preserve_rng, **kwargs
        )

    block.forward = forward
