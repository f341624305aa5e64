"""Advantages of tokens from a value of each, and the value's own loss: what PPO adds to a rollout.

As TRL 1.12 has them (`PPOTrainer`, the last version with it). An answer of n tokens lies in the
first n places of its row, (answers, most). Behind the last token there is one place more where the
row has room: there a value is learned, too, and the answer's score is added. An answer that does
not count has length -1: it has no place.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from memfit.records.reinforcement import Policy, ValueSettings

NOT_COUNTED = -1  # the length of an answer without a place
SMALLEST = 1e-8  # is added to a variance


class Estimates(NamedTuple):
    """Of each place of a rollout's answers, (answers, most); fp32, 0 where nothing counts."""

    advantages: Tensor  # whitened over the rollout
    returns: Tensor  # what values are to be
    rewards: Tensor


def count_tokens(lengths: Tensor, most: int) -> Tensor:
    """(answers,) -> (answers, most) bool: the tokens of answers."""
    return torch.arange(most, device=lengths.device) < lengths.unsqueeze(1)


def find_places(starts: Tensor, most: int) -> Tensor:
    """(answers,) tokens of prompts -> (answers, most): where in its row each place is predicted."""
    return starts.unsqueeze(1) - 1 + torch.arange(most, device=starts.device)


def gather_places(x: Tensor, places: Tensor) -> Tensor:
    """(answers, tokens) of rows -> (answers, most); what lies behind a row is its last number."""
    return x.gather(1, places.clamp(max=x.shape[1] - 1))


def spread_places(x: Tensor, places: Tensor, width: int) -> Tensor:
    """(answers, most) -> (answers, width) of rows; 0 elsewhere."""
    wide = x.new_zeros(len(x), width + x.shape[1])
    return wide.scatter_(1, places, x)[:, :width].contiguous()


def estimate(
    scores: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
    values: Tensor,
    lengths: Tensor,
    *,
    beta: float,
    gamma: float,
    decay: float,
    white_rewards: bool = False,
) -> Estimates:
    """Generalised advantage estimation (Schulman et al. 1506.02438, equation 16).

    scores (answers,); old, reference, values (answers, most): log-probabilities under the policy
    that sampled and under the reference, None where none is compared with, and values. A token's
    reward is -beta (old - reference); decay is the paper's lambda. white_rewards: they are divided
    by their standard deviation, and keep their mean.
    """
    most = values.shape[1]
    tokens, places = count_tokens(lengths, most), count_tokens(lengths + 1, most)
    rewards = torch.zeros_like(values)
    if beta and old is not None and reference is not None:
        rewards = (old - reference).masked_fill(~tokens, 0.0) * -beta
    end = lengths.clamp(min=0, max=most - 1).unsqueeze(1)
    earned = scores.to(rewards).masked_fill(lengths < 0, 0.0)
    rewards = rewards.scatter_add(1, end, earned.unsqueeze(1))
    if white_rewards:
        mean = (rewards * places).sum() / places.sum().clamp(min=1)
        rewards = whiten(rewards, places) + mean * places
    values = values.masked_fill(~places, 0.0)
    after = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)
    surprises = rewards + gamma * after - values
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(scores, dtype=values.dtype)
    for at in reversed(range(most)):
        running = surprises[:, at] + gamma * decay * running
        advantages[:, at] = running
    returns = (advantages + values).masked_fill(~places, 0.0)
    return Estimates(whiten(advantages, tokens), returns, rewards)


def whiten(x: Tensor, counted: Tensor) -> Tensor:
    """Mean 0 and variance 1 over what counts, with n - 1; 0 elsewhere. One number alone is 0."""
    weights, number = counted.to(x), int(counted.sum())
    mean = (x * weights).sum() / max(number, 1)
    spread = ((x - mean).square() * weights).sum() / max(number - 1, 1)
    return (x - mean) * torch.rsqrt(spread + SMALLEST) * weights


class Aims(NamedTuple):
    """What values of a micro-batch are to be; tensors are fp32, (rows, tokens)."""

    old: Tensor  # values in the rollout
    returns: Tensor
    places: Tensor  # 1 where a value is learned
    learned: float  # places of the global batch
    clip: float
    weight: float


class ValueLoss(NamedTuple):
    """The loss, 0-dim, and what the log says of it: (3,), clipped places, places, and the sum of
    their squared errors."""

    loss: Tensor
    sums: Tensor


def value_loss(values: Tensor, aims: Aims) -> ValueLoss:
    """weight / 2 times the mean of max((v - R)², (clip(v) - R)²) over the places that count.

    v now differs from v in the rollout by `clip` at most where it is clipped, and R is the return.
    The slope is in closed form; where both squares are equal each has half of it, as `torch.max`
    has it.
    """
    made = _Clipped.apply(  # type: ignore[no-untyped-call]
        values, aims.old, aims.returns, aims.places, aims.clip, aims.weight / 2 / aims.learned
    )
    return ValueLoss(*made)


class _Clipped(torch.autograd.Function):
    """values, old, returns, weights (rows, tokens) -> loss, sums (3,)."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, clip: float,
        weight: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        low, high = old - clip, old + clip
        bound = torch.minimum(torch.maximum(values, low), high)
        free, bounded = (values - returns).square(), (bound - returns).square()
        inside = ((values >= low) & (values <= high)).to(values)
        share = (free > bounded).to(values) + 0.5 * (free == bounded).to(values)
        slope = 2 * (values - returns) * share
        slope += 2 * (bound - returns) * inside * (1 - share)
        ctx.save_for_backward(slope.mul_(weights).mul_(weight))
        total = (torch.maximum(free, bounded) * weights).sum()
        sums = torch.stack((((bounded > free) * weights).sum(), weights.sum(), total))
        ctx.mark_non_differentiable(sums)
        return total * weight, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, slope * outer[0]), None, None, None, None, None


class Valued(NamedTuple):
    """What an update with a rollout aims at; tensors are fp32, (answers, tokens)."""

    advantages: Tensor
    divergence: float | None  # sum of the KL estimates that rewards are less by
    aims: Aims


def find_counted(rewards: Tensor) -> Tensor:
    """(answers,) bool: those that somebody judged."""
    return ~rewards.isnan()


def aim(
    policy: Policy, settings: ValueSettings, rewards: Tensor, starts: Tensor, lengths: Tensor,
    old: Tensor | None, reference: Tensor | None, values: Tensor, most: int,
) -> Valued:  # fmt: skip
    """rewards, and tokens of prompts and answers: (answers,); old, reference, values: (answers,
    tokens) of rows, each where its token is predicted."""
    counted = find_counted(rewards)
    lengths = lengths.masked_fill(~counted, NOT_COUNTED)
    scores = rewards.nan_to_num(nan=0.0)
    at, width = find_places(starts, most), values.shape[1]
    was, base = (None if x is None else gather_places(x, at) for x in (old, reference))
    found = estimate(
        scores, was, base, gather_places(values, at), lengths, beta=policy.beta,
        gamma=settings.gamma, decay=settings.lam, white_rewards=settings.whiten_rewards,
    )  # fmt: skip
    places = spread_places(count_tokens(lengths + 1, most).float(), at, width)
    divergence = None
    if was is not None and base is not None:
        divergence = float(((was - base) * count_tokens(lengths, most)).sum())
    aims = Aims(
        values, spread_places(found.returns, at, width), places, max(float(places.sum()), 1.0),
        settings.cliprange_value, settings.vf_coef,
    )  # fmt: skip
    return Valued(spread_places(found.advantages, at, width), divergence, aims)
