"""Recomputation of the first blocks, whole (Chen et al. 1604.06174) or in part (2205.05198).

A block that is recomputed selectively keeps the results of products with weights and of fused
attention beside its input, and recomputes the rest: norms, rotations, activations, adapters.
Written-out attention is recomputed too: its scores are what would be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memfit.families.capabilities.added import ADAPTERS

_aten = torch.ops.aten
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)  # bmm is not: written-out attention's
# kept too; by its name, as `torch.nn.attention.varlen`, which few runs need, imports the compiler
VARLEN = "torch_attn::_varlen_attn"


def recompute_blocks(
    blocks: Iterable[nn.Module],
    full: int,
    selective: int,
    added: Callable[[list[str]], str],
    *,
    preserve_rng: bool,
) -> None:
    """Keep the input of the first `full` blocks, and of the next ones that and their products.

    The first, not the last: backward reaches them when the other blocks' activations are gone.
    added: names of a block's matrices -> the module whose product no recomputation asks for
    (`families.added`). `preserve_rng` is needed with dropout only, and costs a copy of the
    generator's state a block.
    """
    for index, block in enumerate(blocks):
        if index < full:
            _recompute(block, preserve_rng)
        elif index < full + selective:
            matrices = [name for name, p in block.named_parameters() if p.dim() == 2]
            _recompute(block, preserve_rng, _keep_products(block, added(matrices)))


def _recompute(block: nn.Module, preserve_rng: bool, contexts: Any = None) -> None:
    plain = block.forward
    selective = {} if contexts is None else {"context_fn": contexts}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return checkpoint(
            plain, *args, use_reentrant=False, preserve_rng_state=preserve_rng,
            **selective, **kwargs,
        )  # fmt: skip

    block.forward = forward


class _Policy:
    """Which results a selective recomputation keeps: those of `SAVED` and `VARLEN`, but for those
    of some modules."""

    def __init__(self) -> None:
        self.forgets = False

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = not self.forgets and (operator in SAVED or operator.name() == VARLEN)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def forget(self, module: nn.Module) -> None:
        """Keep nothing of what this module makes."""
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.forgets = True
            try:
                return plain(*args, **kwargs)
            finally:
                self.forgets = False

        module.forward = forward


def _keep_products(block: nn.Module, added: str) -> Callable[[], Any]:
    """The contexts of a selective recomputation of one block."""
    policy = _Policy()
    names = {n.removesuffix(".weight") for n, _ in block.named_parameters() if _is_adapter(n)}
    for name in (*names, *([added] if added else [])):
        policy.forget(block.get_submodule(name))
    return partial(create_selective_checkpoint_contexts, policy)


def _is_adapter(name: str) -> bool:
    return any(part in name for part in ADAPTERS)
