"""Objectives of pairs of rows: their log-probabilities, and the loss that an objective declares.

Row 2i of a micro-batch is the answer that was preferred to row 2i + 1. What is compared is each
row's log-probability: the fp32 sum over its target tokens, or the mean, under the policy and, where
the objective has one, the reference. The losses themselves are of `memfit.objectives`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.objectives import PairLoss, find_objective
from memfit.records.recipe import Preference, Recipe
from memfit.train.step.loss import IGNORE, check_chunked, gradients_by_chunks


class Rewards:
    """Sums over pairs: rewards of preferred and of rejected answers, and pairs put right.

    A reward is beta times what the policy's log-probability exceeds the reference's by (2305.18290,
    section 4), or beta times the former where there is no reference; of an answer's mean where the
    loss takes means.
    """

    sums: Tensor | None = None  # (3,) fp32, on the device

    def add(self, more: Tensor) -> None:
        """Those of another micro-batch."""
        self.sums = more if self.sums is None else self.sums.add_(more)


def name_rewards(sums: Tensor, pairs: int) -> dict[str, float]:
    """Means over so many pairs, as the log names them; waits for the device."""
    chosen, rejected, won = (float(x) / pairs for x in sums.tolist())
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": won,
    }


def row_log_probs(
    head: nn.Module, hidden: Tensor, labels: Tensor, recipe: Recipe, cap: float | None
) -> Tensor:
    """(rows,) fp32: log-probability of each row's target tokens together.

    hidden (rows, tokens, hidden); labels (rows, tokens), aligned, -100 where nothing is predicted.
    `loss: plain` keeps the logits of all tokens until backward; `chunked` never holds more than a
    chunk of them, and makes them a second time in the backward.
    """
    flat = hidden.flatten(0, 1)
    if recipe.loss == "plain":
        logits = head(flat)
        if cap is not None:
            logits = torch.tanh(logits) * cap
        logits = logits.float()
        losses = nn.functional.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORE, reduction="none"
        )
        return losses.view(labels.shape).sum(1).neg()
    check_chunked(head, recipe)
    compute = getattr(torch, recipe.compute_dtype) if recipe.autocast else hidden.dtype
    weight = cast(Tensor, head.weight)
    if not torch.is_grad_enabled():
        return _by_chunks(flat, weight, labels, compute, recipe.loss_chunk, cap)
    made = _LogProbs.apply(  # type: ignore[no-untyped-call]
        flat, weight, labels, compute, recipe.loss_chunk, cap
    )
    return cast(Tensor, made)


def _by_chunks(
    flat: Tensor,
    weight: Tensor,
    labels: Tensor,
    compute: torch.dtype,
    chunk: int,
    cap: float | None,
) -> Tensor:
    losses = torch.empty(labels.numel(), dtype=torch.float32, device=flat.device)
    targets = labels.flatten()
    with torch.autocast(flat.device.type, enabled=False):
        cast_weight = weight.to(compute)
        for start in range(0, flat.shape[0], chunk):
            here = slice(start, start + chunk)
            logits = flat[here].to(compute) @ cast_weight.t()
            if cap is not None:
                logits.tanh_().mul_(cap)
            log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            losses[here] = nn.functional.nll_loss(
                log_p, targets[here], ignore_index=IGNORE, reduction="none"
            )
            del logits, log_p
    return losses.view(labels.shape).sum(1).neg_()


class _LogProbs(torch.autograd.Function):
    """hidden (tokens, hidden), weight (vocab, hidden), labels (rows, tokens) -> (rows,) fp32.

    How much each row counts is known when all rows are: unlike the loss of single tokens, it cannot
    be differentiated while its logits exist, so that backward makes them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        weight: Tensor,
        labels: Tensor,
        compute: torch.dtype,
        chunk: int,
        cap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(flat, weight, labels)
        ctx.settings = compute, chunk, cap
        return _by_chunks(flat, weight, labels, compute, chunk, cap)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        flat, weight, labels = ctx.saved_tensors
        share = outer[0].neg().unsqueeze(1).expand_as(labels).reshape(-1, 1)  # of losses
        gradients = gradients_by_chunks(
            flat, weight, labels.flatten(), share, *ctx.settings, wants=ctx.needs_input_grad[:2]
        )
        return *gradients, None, None, None, None


def judge(
    policy: Tensor,
    reference: Tensor | None,
    labels: Tensor,
    recipe: Recipe,
    pairs: int,
    rewards: Rewards,
) -> Tensor:
    """Sum of the pairs' losses over `pairs`, 0-dim fp32; adds to `rewards`.

    policy, reference: (rows,) log-probabilities; None where the objective has no reference. Pairs
    of rows without a target do not count.
    """
    loss_type = find_objective(recipe.objective).find_loss(recipe.preference.loss_type)
    counted = (labels[::2] != IGNORE).any(1).float()
    lengths = (labels != IGNORE).sum(1).clamp_(min=1) if loss_type.averages else None
    loss, sums = _Judged.apply(  # type: ignore[no-untyped-call]
        policy, reference, lengths, counted, loss_type.loss, recipe.preference, pairs
    )
    rewards.add(sums)
    return cast(Tensor, loss)


def count_pairs(labels: Tensor) -> Tensor:
    """Pairs that have a target, 0-dim int64."""
    return (labels[::2] != IGNORE).any(1).sum()


class _Judged(torch.autograd.Function):
    """policy (rows,), reference and lengths (rows,) or None, counted (pairs,) -> loss, sums (3,).

    The loss's slope is in closed form: what is kept for the backward is (rows,), whatever it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        policy: Tensor,
        reference: Tensor | None,
        lengths: Tensor | None,
        counted: Tensor,
        loss_of: PairLoss,
        preference: Preference,
        pairs: int,
    ) -> tuple[Tensor, Tensor]:
        beta = preference.beta
        compared = policy if reference is None else policy - reference
        if lengths is not None:
            compared = compared / lengths
        gains = (compared * beta).view(-1, 2)
        chosen, rejected = gains[:, 0], gains[:, 1]
        found = loss_of(chosen, rejected, preference)
        loss = found.values.mul(counted).sum().div_(pairs)
        won = (chosen > rejected).float()
        sums = torch.stack((chosen, rejected, won)).mul_(counted).sum(1)
        slopes = torch.stack((found.by_chosen, found.by_rejected), dim=1)
        slope = slopes.mul_(counted.unsqueeze(1)).mul_(beta / pairs).flatten()
        if lengths is not None:
            slope = slope / lengths
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * outer[0], None, None, None, None, None, None
