"""Advantages of tokens from a value of each, and the value's own loss: what PPO adds to a rollout.

As TRL 1.12 has them (`PPOTrainer`, the last version with it). An answer of n tokens lies in the
first n places of its row, (answers, most). Behind the last token there is one place more where the
row has room: there a value is learned, too, and the answer's score is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

SMALLEST = 1e-8  # is added to a variance


class Estimates(NamedTuple):
    """Of each place of a rollout's answers, (answers, most); fp32, 0 where nothing counts."""

    advantages: Tensor  # whitened over the rollout
    returns: Tensor  # what values are to be
    rewards: Tensor


def count_tokens(lengths: Tensor, most: int) -> Tensor:
    """(answers,) -> (answers, most) bool: the tokens of answers."""
    return torch.arange(most, device=lengths.device) < lengths.unsqueeze(1)


def estimate(
    scores: Tensor,
    old: Tensor,
    reference: Tensor | None,
    values: Tensor,
    lengths: Tensor,
    *,
    beta: float,
    gamma: float,
    decay: float,
) -> Estimates:
    """Generalised advantage estimation (Schulman et al. 1506.02438, equation 16).

    scores (answers,); old, reference, values (answers, most): log-probabilities under the policy
    that sampled and under the reference, None where none is compared with, and values. A token's
    reward is -beta (old - reference); decay is the paper's lambda.
    """
    most = old.shape[1]
    tokens, places = count_tokens(lengths, most), count_tokens(lengths + 1, most)
    rewards = torch.zeros_like(old)
    if beta and reference is not None:
        rewards = (old - reference).masked_fill(~tokens, 0.0) * -beta
    end = lengths.clamp(max=most - 1).unsqueeze(1)
    rewards = rewards.scatter_add(1, end, scores.to(rewards).unsqueeze(1))
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


class ValueLoss(NamedTuple):
    """The loss, 0-dim, and what the log says of it: (2,), clipped places and places."""

    loss: Tensor
    sums: Tensor


def value_loss(
    values: Tensor,
    old: Tensor,
    returns: Tensor,
    lengths: Tensor,
    *,
    places: float,
    clip: float,
    weight: float,
) -> ValueLoss:
    """weight / 2 times the mean of max((v - R)², (clip(v) - R)²) over `places` of a global batch.

    values, old, returns (answers, most): v now, v in the rollout, from which it differs by `clip`
    at most where it is clipped, and R. The slope is in closed form; where both squares are equal
    each has half of it, as `torch.max` has it.
    """
    made = _Clipped.apply(  # type: ignore[no-untyped-call]
        values, old, returns, count_tokens(lengths + 1, old.shape[1]), clip, weight / 2 / places
    )
    return ValueLoss(*made)


def count_places(lengths: Tensor, most: int) -> int:
    """Places whose values are learned: tokens, and one behind them where there is room."""
    return int(count_tokens(lengths + 1, most).sum())


class _Clipped(torch.autograd.Function):
    """values, old, returns, counted (answers, most) -> loss, sums (2,)."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, old: Tensor, returns: Tensor, counted: Tensor, clip: float,
        weight: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weights = counted.to(values)
        low, high = old - clip, old + clip
        bound = torch.minimum(torch.maximum(values, low), high)
        free, bounded = (values - returns).square(), (bound - returns).square()
        inside = ((values >= low) & (values <= high)).to(values)
        share = (free > bounded).to(values) + 0.5 * (free == bounded).to(values)
        slope = 2 * (values - returns) * share
        slope += 2 * (bound - returns) * inside * (1 - share)
        ctx.save_for_backward(slope.mul_(weights).mul_(weight))
        sums = torch.stack((((bounded > free) * weights).sum(), weights.sum()))
        ctx.mark_non_differentiable(sums)
        return (torch.maximum(free, bounded) * weights).sum() * weight, sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, slope * outer[0]), None, None, None, None, None
