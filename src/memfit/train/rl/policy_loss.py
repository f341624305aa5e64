"""The policy's loss of sampled answers, and its exact slope by each token's log-probability.

Every sum is divided by counts of the whole global batch, which `token_weights` works in, so that
how the batch is cut changes nothing. The formulas are TRL 1.16's (`GRPOTrainer._compute_loss`,
`RLOOTrainer._compute_loss`, `OnlineDPOTrainer.training_step`) at one micro-batch a step;
PPO's are 1.12's (`PPOTrainer`), the last version with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from memfit.core.errors import InvalidRequest
from memfit.records.recipe import Preference
from memfit.records.reinforcement import Online, Policy, pair_losses
from memfit.train.step.preference import name_rewards


class Counts(NamedTuple):
    """What a global batch's sums are divided by; of all its micro-batches and ranks together."""

    rows: int  # answers, those that do not count included; of pairs, those that count
    tokens: float  # of answers that count; the mean of a rollout's steps where it has many
    longest: int  # the most tokens that an answer may have


class Answers(NamedTuple):
    """One micro-batch of answers, beside their tokens' log-probabilities; tensors are fp32."""

    objective: Online
    policy: Policy
    counts: Counts
    temperature: float  # that they were sampled at
    mask: Tensor  # (rows, tokens): 1 where a token of an answer counts
    # (rows,); (rows, tokens) where each token has one of its own; of pairs 1 is the chosen answer,
    # -1 the rejected one
    advantages: Tensor
    old: Tensor | None = None  # (rows, tokens) under the policy that sampled; None: this policy
    reference: Tensor | None = None  # (rows, tokens); None where `beta` is 0, and of PPO


class LossAndSums(NamedTuple):
    """The loss and what the log says of it."""

    loss: Tensor  # 0-dim, this micro-batch's share
    # (5,): clipped below, clipped above, KL estimates, what these are counts of (tokens, or rows of
    # a ratio that is a row's), tokens. Of pairs: rewards of chosen answers, of rejected ones, log
    # ratios, pairs put right, tokens
    sums: Tensor


def token_weights(mask: Tensor, counts: Counts, policy: Policy) -> Tensor:
    """(rows, tokens): what each token's loss is multiplied by; the batch's loss is the sum.

    dapo: one over all tokens. grpo: each answer counts the same. dr_grpo: one over what all answers
    could hold, so that length changes nothing.
    """
    if policy.loss_type == "dapo":
        return mask / max(counts.tokens, 1.0)
    if policy.loss_type == "dr_grpo":
        return mask / (counts.rows * counts.longest)
    return mask / mask.sum(dim=1, keepdim=True).clamp(min=1.0) / counts.rows


def policy_loss(log_probs: Tensor, answers: Answers) -> LossAndSums:
    """Of a micro-batch; log_probs (rows, tokens) fp32.

    grpo: clipped ratios and a KL estimate of each token. rloo: REINFORCE with the clipped ratio of
    a whole answer, whose KL divergence is part of the reward. online_dpo: a loss of each pair.
    ppo: clipped ratios of tokens, whose KL divergence is part of their rewards.
    """
    policy = answers.policy
    if policy.beta and answers.reference is None and answers.objective != "ppo":
        raise InvalidRequest(
            f"`policy.beta: {policy.beta}`, and the reference's log-probabilities are not there",
            hint="compute them for each rollout, or use `policy.beta: 0`",
        )
    find = SLOPES[answers.objective]
    made = _Slope.apply(log_probs, *find(log_probs.detach(), answers))  # type: ignore[no-untyped-call]
    return LossAndSums(*made)


def _grpo_slope(log_probs: Tensor, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    """Loss 0-dim, its slope (rows, tokens), sums (5,)."""
    mask, policy, advantages = answers.mask, answers.policy, answers.advantages
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    weights = token_weights(mask, answers.counts, policy)
    log_ratio = torch.zeros_like(log_probs) if answers.old is None else log_probs - answers.old
    by_row = policy.importance_sampling_level == "sequence"
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    if by_row:
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / lengths
    clipped = _clip(log_ratio, advantages, policy)
    losses, by_ratio = clipped.losses, clipped.slopes  # slopes by the log of the ratio
    slope = torch.zeros_like(log_probs)
    divergence = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    if policy.beta and answers.reference is not None:
        gap = answers.reference - log_probs
        raised = gap.exp()
        estimate, step = raised - gap - 1, 1 - raised
        if policy.use_bias_correction_kl:
            ratio = log_ratio.exp()
            estimate, step = estimate * ratio, step * ratio
            by_ratio = by_ratio + policy.beta * estimate
        losses = losses + policy.beta * estimate
        slope += policy.beta * step * weights
        divergence = (estimate * mask).sum()
    if by_row:  # each token moves the ratio of all of its row
        slope += (by_ratio * weights).sum(dim=1, keepdim=True) * mask / lengths
    else:
        slope += by_ratio * weights
    counted = torch.ones_like(clipped.low) if by_row else mask
    sums = torch.stack(
        [(clipped.low * counted).sum(), (clipped.high * counted).sum(), divergence,
         counted.sum(), mask.sum()]
    )  # fmt: skip
    return (losses * weights).sum(), slope, sums


def _rloo_slope(log_probs: Tensor, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    mask, advantages, rows = answers.mask, answers.advantages.unsqueeze(1), answers.counts.rows
    log_ratio = torch.zeros_like(log_probs) if answers.old is None else log_probs - answers.old
    log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True)
    clipped = _clip(log_ratio, advantages, answers.policy)
    divergence = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    if answers.reference is not None:
        divergence = ((log_probs - answers.reference) * mask).sum()
    sums = torch.stack(
        [clipped.low.sum(), clipped.high.sum(), divergence, clipped.low.new_tensor(len(mask)),
         mask.sum()]
    )  # fmt: skip
    return clipped.losses.sum() / rows, clipped.slopes * mask / rows, sums


def _pair_slope(log_probs: Tensor, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss of pairs of neighbouring rows by what each answer's log-probability, the sum
    over its tokens, exceeds the reference's by."""
    policy, mask, pairs = answers.policy, answers.mask, max(answers.counts.rows // 2, 1)
    loss_type = pair_losses(answers.objective)[policy.loss_type]
    assert answers.reference is not None  # as `policy_loss` has checked
    ratios = ((log_probs - answers.reference) * mask).sum(dim=1)
    gains = (ratios * policy.beta).view(-1, 2)
    ahead = answers.advantages.view(-1, 2) > 0
    counted = mask.amax(dim=1).view(-1, 2).amin(dim=1)
    chosen, rejected = (gains * ahead).sum(dim=1), (gains * ~ahead).sum(dim=1)
    found = loss_type.loss(chosen, rejected, Preference(beta=policy.beta))
    slopes = torch.where(ahead, found.by_chosen.unsqueeze(1), found.by_rejected.unsqueeze(1))
    slope = slopes.mul_(policy.beta / pairs).view(-1, 1) * mask
    won = (chosen > rejected) * counted
    sums = torch.stack(
        [(chosen * counted).sum(), (rejected * counted).sum(), ratios.sum(), won.sum(), mask.sum()]
    )
    return (found.values * counted).sum() / pairs, slope, sums


def name_sums(objective: Online, sums: Iterable[float], rows: int) -> dict[str, float]:
    """Figures of the log; sums (6,) as `StepResult.rewards`, of `rows` answers."""
    low, high, _, counted, tokens, entropy = (float(s) for s in sums)
    shared = {"entropy": entropy / max(tokens, 1.0)}
    if pair_losses(objective):
        return name_rewards((low, high, counted), max(rows // 2, 1)) | shared
    return {
        "clipped_low": low / max(counted, 1.0), "clipped_high": high / max(counted, 1.0), **shared
    }  # fmt: skip


SLOPES = {
    "grpo": _grpo_slope, "ppo": _grpo_slope, "rloo": _rloo_slope, "online_dpo": _pair_slope,
}  # fmt: skip


class _Clipped(NamedTuple):
    losses: Tensor
    slopes: Tensor  # of the losses by the log of the ratio
    low: Tensor  # 1 where a ratio too low is clipped
    high: Tensor


def _clip(log_ratio: Tensor, advantages: Tensor, policy: Policy) -> _Clipped:
    """-min(r A, clip(r) A) (Schulman et al. 1707.06347, equation 7), and its slope by log r.

    Where both are equal each has half of the slope, as `torch.min` has it.
    """
    ratio = log_ratio.exp()
    least, most = 1 - policy.epsilon, 1 + policy.epsilon_high
    first, inside = ratio, torch.ones_like(ratio)
    if policy.delta:
        first, inside = ratio.clamp(max=policy.delta), (ratio <= policy.delta).to(ratio)
    second = ratio.clamp(least, most)
    free, bound = first * advantages, second * advantages
    own = ratio * advantages
    within = ((ratio >= least) & (ratio <= most)).to(ratio)
    share = (free < bound).to(ratio) + 0.5 * (free == bound).to(ratio)
    slopes = -own * (share * inside + (1 - share) * within)
    low = ((first < least) & (advantages < 0)).to(ratio)
    high = ((first > most) & (advantages > 0)).to(ratio)
    return _Clipped(-torch.minimum(free, bound), slopes, low, high)


class _Slope(torch.autograd.Function):
    """A loss whose slope is known already: log_probs, loss, slope, sums -> loss, sums."""

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, loss: Tensor, slope: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, slope * outer[0]), None, None, None
