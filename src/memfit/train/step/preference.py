"""Objectives of pairs of rows: their log-probabilities, and the loss that an objective declares.

Row 2i of a micro-batch is the answer that was preferred to row 2i + 1. What is compared is each
row's log-probability: the fp32 sum over its target tokens, or the mean, under the policy and, where
the objective has one, the reference. The losses themselves are of `memfit.objectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.objectives import PairLoss, find_objective
from memfit.parallelism import run_as_forward
from memfit.parallelism.whole import local_part
from memfit.records.recipe import Preference, Recipe
from memfit.train.distributed.compared import ALONE, Together
from memfit.train.step.loss import IGNORE, check_chunked, gradients_by_chunks


class Rewards:
    """Sums over pairs: rewards of preferred and of rejected answers, and pairs put right.

    A reward is beta times what the policy's log-probability exceeds the reference's by (2305.18290,
    section 4), or beta times the former where there is no reference; of an answer's mean where the
    loss takes means.
    """

    # (3,) fp32, on the device; a fourth is the cross-entropy that the objective adds, times pairs
    sums: Tensor | None = None

    def add(self, more: Tensor) -> None:
        """Those of another micro-batch."""
        self.sums = more if self.sums is None else self.sums.add_(more)


def name_rewards(sums: Sequence[float], pairs: int) -> dict[str, float]:
    """Means over `pairs` pairs, as the log names them."""
    chosen, rejected, won, *beside = (x / pairs for x in sums)
    named = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": won,
    }
    return named | dict(zip(("cross_entropy",), beside, strict=False))


def row_log_probs(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    recipe: Recipe,
    cap: float | None,
    context: Tensor | None = None,
) -> Tensor:
    """(rows,) fp32: log-probability of each row's target tokens together; (2, rows) where there is
    a context, whose tokens' is the second row.

    hidden (rows, tokens, hidden); labels (rows, tokens), aligned, -100 where nothing is predicted.
    `loss: plain` keeps the logits of all tokens until backward; `chunked` never holds more than a
    chunk of them, and makes them a second time in the backward.
    """
    flat = hidden.flatten(0, 1)
    answered = None
    if context is not None:
        answered = labels != IGNORE
        labels = labels.maximum(context)
    if recipe.loss == "plain":
        logits = head(flat)
        if cap is not None:
            logits = torch.tanh(logits) * cap
        logits = logits.float()
        losses = nn.functional.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORE, reduction="none"
        )
        losses = local_part(losses)  # of logits cut among ranks: the same on all
        if answered is not None:
            split = _Split.apply(losses.view(labels.shape), answered)  # type: ignore[no-untyped-call]
            return cast(Tensor, split)
        return losses.view(labels.shape).sum(1).neg()
    check_chunked(head, recipe)

    def chunks() -> Tensor:
        return _log_probs_by_chunks(head, flat, labels, answered, recipe, cap)

    # A sharded head holds its whole weight only while its forward runs.
    return run_as_forward(head, chunks) if recipe.parallel.world > 1 else chunks()


def _log_probs_by_chunks(
    head: nn.Module,
    flat: Tensor,
    labels: Tensor,
    answered: Tensor | None,
    recipe: Recipe,
    cap: float | None,
) -> Tensor:
    compute = getattr(torch, recipe.compute_dtype) if recipe.autocast else flat.dtype
    weight = cast(Tensor, head.weight)
    if not torch.is_grad_enabled():
        return _by_chunks(flat, weight, labels, answered, compute, recipe.loss_chunk, cap)
    made = _LogProbs.apply(  # type: ignore[no-untyped-call]
        flat, weight, labels, answered, compute, recipe.loss_chunk, cap
    )
    return cast(Tensor, made)


def _by_chunks(
    flat: Tensor,
    weight: Tensor,
    labels: Tensor,
    answered: Tensor | None,
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
    if answered is not None:
        return _split(losses.view(labels.shape), answered)
    return losses.view(labels.shape).sum(1).neg_()


def _split(losses: Tensor, answered: Tensor) -> Tensor:
    """(rows, tokens) of both -> (2, rows): log-probabilities of answers, and of all the rest."""
    own, rest = (losses * answered).sum(1), (losses * ~answered).sum(1)
    return torch.stack((own, rest)).neg_()


def _slope_of_split(outer: Tensor, answered: Tensor) -> Tensor:
    own, rest = outer.unsqueeze(2)
    return torch.where(answered, own, rest).neg_()


class _Split(torch.autograd.Function):
    """As `_split`, of losses that have a gradient."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, answered: Tensor) -> Tensor:
        ctx.save_for_backward(answered)
        return _split(losses, answered)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return _slope_of_split(outer[0], *ctx.saved_tensors), None


class _LogProbs(torch.autograd.Function):
    """hidden (tokens, hidden), weight (vocab, hidden), labels (rows, tokens) -> (rows,) fp32; (2,
    rows) where `answered` (rows, tokens) parts answers from the rest.

    How much each row counts is known when all rows are: unlike the loss of single tokens, it cannot
    be differentiated while its logits exist, so that backward makes them a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        weight: Tensor,
        labels: Tensor,
        answered: Tensor | None,
        compute: torch.dtype,
        chunk: int,
        cap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(flat, weight, labels, answered)
        ctx.settings = compute, chunk, cap
        return _by_chunks(flat, weight, labels, answered, compute, chunk, cap)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        flat, weight, labels, answered = ctx.saved_tensors
        if answered is None:
            share = outer[0].neg().unsqueeze(1).expand_as(labels).reshape(-1, 1)  # of losses
        else:
            share = _slope_of_split(outer[0], answered).view(-1, 1)
        gradients = gradients_by_chunks(
            flat, weight, labels.flatten(), share, *ctx.settings, wants=ctx.needs_input_grad[:2]
        )
        return *gradients, None, None, None, None, None


def row_scores(
    head: nn.Module, hidden: Tensor, labels: Tensor, together: Together = ALONE
) -> Tensor:
    """(rows,) fp32: what a head of one number makes of each row's last token, as the classes of
    sequence classification in transformers do, of one label; of other tokens no score is made. Of
    ranks that share a row's tokens, those that do not have it give 0.

    hidden (rows, tokens, hidden); labels (rows, tokens), -100 but at the token that is scored.
    """
    shared = together.tokens is not None
    mesh = getattr(hidden, "device_mesh", None)  # of ranks that share products, and have all tokens
    picked = _AtEnds.apply(local_part(hidden), labels, shared)  # type: ignore[no-untyped-call]
    if mesh is not None:
        from torch.distributed.tensor import DTensor

        picked = DTensor.from_local(picked, mesh, run_check=False)  # the same on all
    scores = local_part(head(picked))
    del picked
    return scores.float().squeeze(1)


class _AtEnds(torch.autograd.Function):
    """hidden (rows, tokens, hidden), labels (rows, tokens) -> (rows, hidden); shared: rows may end
    on another rank, and have zeros here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, shared: bool) -> Tensor:
        found = labels != IGNORE
        ends = found.view(torch.uint8).argmax(1)
        here = found.any(1, keepdim=True) if shared else None
        del found
        ctx.save_for_backward(ends, here)
        ctx.whole = hidden.shape
        picked = hidden.gather(1, _across(ends, hidden.shape[2])).squeeze(1)
        return picked if here is None else picked.mul_(here)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        ends, here = ctx.saved_tensors
        slope = outer[0].new_zeros(ctx.whole)
        each = outer[0] if here is None else outer[0] * here
        return slope.scatter_(1, _across(ends, ctx.whole[2]), each.unsqueeze(1)), None, None


def _across(ends: Tensor, width: int) -> Tensor:
    """(rows,) -> (rows, 1, hidden), without bytes of its own."""
    return ends.view(-1, 1, 1).expand(-1, 1, width)


def judge(
    policy: Tensor,
    reference: Tensor | None,
    labels: Tensor,
    recipe: Recipe,
    pairs: int,
    rewards: Rewards,
    beside: float = 1.0,
    together: Together = ALONE,
) -> Tensor:
    """Sum of the pairs' losses over `pairs`, 0-dim fp32; adds to `rewards`.

    policy, reference: (rows,) log-probabilities; None where the objective has no reference. Pairs
    of rows without a target do not count. Where the objective has a cross-entropy, too, it is
    of the preferred rows, over `beside` tokens; policy (2, rows) has what they say beside answers.
    """
    loss_type = find_objective(recipe.objective).find_loss(recipe.preference.loss_type)
    counted = together.any(labels[::2] != IGNORE).float()
    lengths = together.count_each(labels != IGNORE).clamp_(min=1) if loss_type.averages else None
    loss, sums = _Judged.apply(  # type: ignore[no-untyped-call]
        policy, reference, lengths, counted, loss_type.loss, recipe.preference, pairs, beside,
        together.says,
    )  # fmt: skip
    rewards.add(sums)
    return cast(Tensor, loss)


def count_sums(recipe: Recipe) -> int:
    """How many sums over pairs, or over rated answers, `Rewards` of a recipe has."""
    if recipe.rates:
        return 5 if recipe.mismatches else 4
    return 4 if recipe.preference.cross_entropy else 3


def count_pairs(labels: Tensor, together: Together = ALONE) -> Tensor:
    """Pairs that have a target, 0-dim int64."""
    return together.number(labels[::2] != IGNORE)


class _Judged(torch.autograd.Function):
    """policy (rows,) or (2, rows), reference and lengths (rows,) or None, counted (pairs,) -> loss,
    sums (3,) or, with a cross-entropy, (4,).

    The loss's slope is in closed form: what is saved for the backward is (rows,), whatever it is.
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
        beside: float,
        says: bool,
    ) -> tuple[Tensor, Tensor]:
        beta = preference.beta
        own = policy if policy.dim() == 1 else policy[0]
        compared = own if reference is None else own - reference
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
        if preference.cross_entropy:
            by_each = preference.cross_entropy / beside
            nats = policy[..., ::2].sum().neg_()
            loss = loss.add_(nats, alpha=by_each)
            sums = torch.cat((sums, nats.mul_(pairs / beside).view(1)))
            if policy.dim() == 2:
                slope = torch.stack((slope, torch.zeros_like(slope)))
            slope[..., ::2].sub_(counted, alpha=by_each)
        if not says:
            loss, sums = loss.zero_(), sums.zero_()
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * outer[0], *[None] * 8
