"""Losses of single answers by their rewards, each with its slope in closed form.

A reward is beta times what a log-probability exceeds the reference's by. Values and slopes are held
against autograd and against TRL's own trainer (tests/objectives).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.objectives import Knobs, RatedLosses

if TYPE_CHECKING:
    from torch import Tensor


def beyond_a_baseline(
    rewards: Tensor, baseline: Tensor | None, desirable: Tensor, knobs: Knobs
) -> RatedLosses:
    """w (1 - sigmoid(r - z)) of desirable answers, w (1 - sigmoid(z - r)) of the others.

    z is the baseline, 0 where there is none; w is `desirable` or `undesirable`.
    """
    sign = desirable.to(rewards.dtype).mul_(2).sub_(1)
    weight = (sign + 1).mul_(knobs.desirable / 2) + (1 - sign).mul_(knobs.undesirable / 2)
    won = (rewards if baseline is None else rewards - baseline).mul(sign).sigmoid()
    losses = (1 - won).mul_(weight)
    return RatedLosses(losses, (won - 1).mul_(won).mul_(weight).mul_(sign))
