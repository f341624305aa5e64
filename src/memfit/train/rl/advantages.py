"""Advantages: by how much an answer's reward exceeds what was expected of its prompt.

Rewards are fp32 vectors of a whole rollout; answers to one prompt are neighbours. NaN stands for an
answer that no function could judge: it moves no baseline, and its advantage is 0. The formulas are
TRL 1.16's (`GRPOTrainer`, `RLOOTrainer`, `OnlineDPOTrainer`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import Policy

SMALLEST = 1e-4  # is added to a standard deviation


def sum_rewards(by_function: Tensor, weights: Tensor) -> Tensor:
    """(answers, functions), (functions,) -> (answers,): NaN where every function says nothing.

    A function that says nothing of an answer adds nothing to it.
    """
    total = (by_function * weights).nansum(dim=1)
    return total.masked_fill(by_function.isnan().all(dim=1), torch.nan)


def group_advantages(rewards: Tensor, group: int, policy: Policy) -> Tensor:
    """GRPO's, (answers,): reward less its group's mean (Shao et al. 2402.03300, section 4.1.2).

    `policy.scale_rewards` says what divides it: the group's standard deviation, the rollout's, or
    nothing (Dr. GRPO, 2503.20783).
    """
    _check_groups(rewards, group)
    grouped = rewards.view(-1, group)
    advantages = (grouped - grouped.nanmean(dim=1, keepdim=True)).view(-1)
    if policy.scale_rewards == "group":
        advantages = advantages / (_deviation(grouped).repeat_interleave(group) + SMALLEST)
    elif policy.scale_rewards == "batch":
        advantages = advantages / (_deviation(rewards.unsqueeze(0)) + SMALLEST)
    return advantages.nan_to_num(nan=0.0)


def leave_one_out_advantages(rewards: Tensor, group: int, policy: Policy) -> Tensor:
    """RLOO's, (answers,): reward less the mean of the group's others (Ahmadian et al. 2402.14740).

    The KL penalty is part of the reward here: see `penalise`.
    """
    _check_groups(rewards, group)
    grouped = rewards.view(-1, group)
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    baseline = (grouped.nansum(dim=1, keepdim=True) - grouped) / others
    advantages = (grouped - baseline).view(-1)
    if policy.normalize_advantages:
        spread = _deviation(advantages.unsqueeze(0))
        advantages = (advantages - advantages.nanmean()) / (spread + SMALLEST)
    return advantages.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def penalise(rewards: Tensor, old: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Rewards less beta times the sampled answer's log ratio to the reference, (answers,).

    old, reference, mask: (answers, tokens); the estimate is the first-order one, which may be
    negative.
    """
    return rewards - beta * ((old - reference) * mask).sum(dim=1)


def find_judged_pairs(rewards: Tensor) -> Tensor:
    """(answers,) bool: both answers to the prompt have a reward, so that they can be compared."""
    both = ~rewards.view(-1, 2).isnan().any(dim=1)
    return both.repeat_interleave(2)


def order_pairs(rewards: Tensor) -> Tensor:
    """Online DPO's, (answers,): 1 of the chosen answer to each prompt, -1 of the rejected one.

    Of two equal rewards the first answer is chosen.
    """
    _check_groups(rewards, 2)
    first, second = rewards.view(-1, 2).unbind(1)
    ahead = (first >= second).float() * 2 - 1
    return torch.stack((ahead, -ahead), dim=1).flatten()


def find_even_groups(rewards: Tensor, group: int) -> Tensor:
    """(groups,) bool: all answers have the same reward, or at most one has any: nothing to learn.

    Dynamic sampling (DAPO, 2503.14476, section 3.2) draws other prompts in their place.
    """
    _check_groups(rewards, group)
    grouped = rewards.view(-1, group)
    known = ~grouped.isnan()
    highest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return (known.sum(dim=1) < 2) | (highest == lowest)


def _deviation(rows: Tensor) -> Tensor:
    """(rows,) standard deviation with n - 1, of what is no NaN; NaN of fewer than two."""
    mean = rows.nanmean(dim=1, keepdim=True)
    count = (~rows.isnan()).sum(dim=1)
    variance = (rows - mean).square().nansum(dim=1) / (count - 1)
    return variance.sqrt().masked_fill(count < 2, torch.nan)


def _check_groups(rewards: Tensor, group: int) -> None:
    if group < 2:
        raise InvalidRequest(
            f"`rollout.num_generations: {group}`: an answer is compared with others to its prompt",
            hint="use 2 or more",
        )
    if rewards.numel() % group:
        raise InvalidRequest(
            f"{rewards.numel()} rewards are no whole groups of {group} answers",
            hint="a rollout holds `num_generations` answers to each prompt",
        )
