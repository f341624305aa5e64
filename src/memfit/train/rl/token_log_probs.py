"""Log-probability and entropy of each token of an answer: two ways to the same numbers.

`loss: plain` keeps the logits of all tokens until backward; `chunked` never holds more than a chunk
of them, and makes them a second time in the backward, when each token's slope is known.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from memfit.records.recipe import Recipe
from memfit.train.step.loss import IGNORE, check_chunked, gradients_by_chunks


class TokenLogProbs(NamedTuple):
    """fp32, 0 where nothing is predicted."""

    log_probs: Tensor  # (rows, tokens)
    entropy: Tensor  # (rows, tokens) in nats; never differentiated


class _Settings(NamedTuple):
    compute: torch.dtype
    chunk: int
    cap: float | None  # logits are bent to stay below it by a tanh


def token_log_probs(
    head: nn.Module, hidden: Tensor, labels: Tensor, recipe: Recipe, cap: float | None
) -> TokenLogProbs:
    """Of each target token. hidden (rows, tokens, hidden), already divided by what divides logits,
    the temperature included; labels (rows, tokens), aligned, -100 where nothing is predicted."""
    flat = hidden.flatten(0, 1)
    if recipe.loss == "plain":
        logits = head(flat)
        if cap is not None:
            logits = torch.tanh(logits) * cap
        logits = logits.float()
        losses = nn.functional.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORE, reduction="none"
        )
        with torch.no_grad():
            entropy = _entropy(torch.log_softmax(logits, dim=-1), labels.flatten())
        return TokenLogProbs(losses.view(labels.shape).neg(), entropy.view(labels.shape))
    check_chunked(head, recipe)
    compute = getattr(torch, recipe.compute_dtype) if recipe.autocast else hidden.dtype
    weight = cast(Tensor, head.weight)
    settings = _Settings(compute, recipe.loss_chunk, cap)
    if not torch.is_grad_enabled():
        return TokenLogProbs(*_by_chunks(flat, weight, labels, settings))
    made = _Chunked.apply(flat, weight, labels, settings)  # type: ignore[no-untyped-call]
    return TokenLogProbs(*made)


def _by_chunks(
    flat: Tensor, weight: Tensor, labels: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor]:
    targets = labels.flatten()
    losses = torch.empty(labels.numel(), dtype=torch.float32, device=flat.device)
    entropy = torch.empty_like(losses)
    with torch.autocast(flat.device.type, enabled=False):
        cast_weight = weight.to(settings.compute)
        for start in range(0, flat.shape[0], settings.chunk):
            here = slice(start, start + settings.chunk)
            logits = flat[here].to(settings.compute) @ cast_weight.t()
            if settings.cap is not None:
                logits.tanh_().mul_(settings.cap)
            log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            del logits
            losses[here] = nn.functional.nll_loss(
                log_p, targets[here], ignore_index=IGNORE, reduction="none"
            )
            entropy[here] = _entropy(log_p, targets[here])
            del log_p
    return losses.view(labels.shape).neg_(), entropy.view(labels.shape)


def _entropy(log_p: Tensor, targets: Tensor) -> Tensor:
    """(tokens,) of (tokens, vocab) log-probabilities; 0 where there is no target."""
    found = -(log_p.exp() * log_p).sum(dim=-1)
    return found.masked_fill_(targets == IGNORE, 0.0)


class _Chunked(torch.autograd.Function):
    """hidden (tokens, hidden), weight (vocab, hidden), labels (rows, tokens) -> twice (rows,
    tokens) fp32, of which the second has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, weight: Tensor, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(flat, weight, labels)
        ctx.settings = settings
        log_probs, entropy = _by_chunks(flat, weight, labels, settings)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        flat, weight, labels = ctx.saved_tensors
        share = outer[0].neg().reshape(-1, 1)  # of losses
        gradients = gradients_by_chunks(
            flat, weight, labels.flatten(), share, *ctx.settings, wants=ctx.needs_input_grad[:2]
        )
        return *gradients, None, None
