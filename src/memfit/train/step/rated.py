"""Objectives of rated answers: each row's reward against a baseline, which has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memfit.objectives import RatedLoss, find_objective
from memfit.records.recipe import Preference, Recipe
from memfit.train.distributed.compared import ALONE, Together
from memfit.train.step.loss import IGNORE
from memfit.train.step.preference import Rewards


def name_ratings(sums: Sequence[float], answers: int) -> dict[str, float]:
    """Means of desirable and of other answers, as the log names them.

    sums: as of `judge_rated`. A mean over no answer is left out.
    """
    good, bad, of_good, of_bad, *divergence = sums
    named: dict[str, float] = {}
    if of_good:
        named["reward_desirable"] = good / of_good
    if of_bad:
        named["reward_undesirable"] = bad / of_bad
    if of_good and of_bad:
        named["reward_margin"] = good / of_good - bad / of_bad
    return named | dict(zip(("kl",), (total / answers for total in divergence), strict=False))


def count_answers(labels: Tensor, together: Together = ALONE) -> Tensor:
    """Rows that have a target, 0-dim int64."""
    return together.number(labels != IGNORE)


def find_baseline(
    policy: Tensor, reference: Tensor, labels: Tensor, together: Together = ALONE
) -> Tensor:
    """z0, 0-dim (2402.01306, section 4.1): the mean of what answers to other prompts are more
    likely by than under the reference, at least 0. (rows,), labels (rows, tokens). Of ranks it is
    over the rows of all, as TRL's: that of one process with as many rows in a micro-batch."""
    counted = together.any(labels != IGNORE).float()
    return together.mean(policy - reference, counted).clamp_(min=0)


def judge_rated(
    policy: Tensor,
    reference: Tensor,
    baseline: Tensor | None,
    desirable: Tensor,
    labels: Tensor,
    recipe: Recipe,
    answers: int,
    rewards: Rewards,
    together: Together = ALONE,
) -> Tensor:
    """Sum of the rows' losses over `answers`, 0-dim fp32; adds to `rewards`.

    policy, reference: (rows,) log-probabilities. Rows without a target do not count. What is added:
    sums of rewards of desirable and of other answers, how many there are of each, and with a
    baseline, of it over all rows.
    """
    loss_of = find_objective(recipe.objective).find_loss(recipe.preference.loss_type).loss
    counted = together.any(labels != IGNORE).float()
    loss, sums = _Judged.apply(  # type: ignore[no-untyped-call]
        policy, reference, baseline, desirable, counted, loss_of, recipe.preference, answers,
        together.says,
    )  # fmt: skip
    rewards.add(sums)
    return cast(Tensor, loss)


class _Judged(torch.autograd.Function):
    """policy, reference, counted (rows,), baseline (), desirable (rows,) bool -> loss, sums (4,);
    with a baseline, (5,)."""

    @staticmethod
    def forward(
        ctx: Any,
        policy: Tensor,
        reference: Tensor,
        baseline: Tensor | None,
        desirable: Tensor,
        counted: Tensor,
        loss_of: RatedLoss,
        preference: Preference,
        answers: int,
        says: bool,
    ) -> tuple[Tensor, Tensor]:
        beta = preference.beta
        gains = (policy - reference) * beta
        below = None if baseline is None else baseline * beta
        found = loss_of(gains, below, desirable, preference)
        loss = found.values.mul(counted).sum().div_(answers)
        good = desirable * counted
        bad = counted - good
        sums = [(gains * good).sum(), (gains * bad).sum(), good.sum(), bad.sum()]
        if baseline is not None:
            sums.append(baseline * counted.sum())
        ctx.save_for_backward(found.by_reward.mul(counted).mul_(beta / answers))
        total = torch.stack(sums)
        if not says:
            loss, total = loss.zero_(), total.zero_()
        ctx.mark_non_differentiable(total)
        return loss, total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * outer[0], *[None] * 8
