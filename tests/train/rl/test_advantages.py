"""Advantages by hand and by their definitions: groups, the rollout, leave one out, no reward."""

import statistics

import pytest
import torch

from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import Policy
from memfit.train.rl.advantages import (
    find_even_groups,
    group_advantages,
    leave_one_out_advantages,
    penalise,
    sum_rewards,
)

NAN = float("nan")
REWARDS = [1.0, 2.0, 4.0, 5.0, 0.0, 0.0, 1.0, 3.0]


def groups():
    return REWARDS[:4], REWARDS[4:]


def test_an_advantage_is_of_its_own_group():
    found = group_advantages(torch.tensor(REWARDS), 4, Policy()).tolist()
    expected = [
        (r - statistics.mean(g)) / (statistics.stdev(g) + 1e-4) for g in groups() for r in g
    ]
    assert found == pytest.approx(expected, abs=1e-6)


def test_scaled_by_the_rollout():
    found = group_advantages(torch.tensor(REWARDS), 4, Policy(scale_rewards="batch")).tolist()
    spread = statistics.stdev(REWARDS) + 1e-4
    assert found == pytest.approx(
        [(r - statistics.mean(g)) / spread for g in groups() for r in g], abs=1e-6
    )


def test_not_scaled():
    found = group_advantages(torch.tensor(REWARDS), 4, Policy(scale_rewards="none")).tolist()
    assert found == pytest.approx([r - statistics.mean(g) for g in groups() for r in g])


def test_leave_one_out():
    found = leave_one_out_advantages(torch.tensor(REWARDS), 4, Policy()).tolist()
    expected = [r - statistics.mean(g[:i] + g[i + 1 :]) for g in groups() for i, r in enumerate(g)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_leave_one_out_whitened_over_the_rollout():
    plain = leave_one_out_advantages(torch.tensor(REWARDS), 4, Policy()).tolist()
    found = leave_one_out_advantages(
        torch.tensor(REWARDS), 4, Policy(normalize_advantages=True)
    ).tolist()
    mean, spread = statistics.mean(plain), statistics.stdev(plain) + 1e-4
    assert found == pytest.approx([(a - mean) / spread for a in plain], abs=1e-6)


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_an_answer_without_a_reward_moves_nobody(advantages):
    """The others' are those of a group without it."""
    found = advantages(torch.tensor([1.0, NAN, 2.0, 4.0]), 4, Policy()).tolist()
    alone = advantages(torch.tensor([1.0, 2.0, 4.0]), 3, Policy()).tolist()
    assert found[1] == 0
    assert [found[0], *found[2:]] == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[NAN] * 4, [NAN, 3.0, NAN, NAN], [2.0] * 4])
def test_a_group_that_tells_nothing_apart_teaches_nothing(advantages, scale, rewards):
    policy = Policy(scale_rewards=scale)
    assert advantages(torch.tensor(rewards), 4, policy).tolist() == [0.0] * 4


def test_functions_are_weighed_and_one_that_is_silent_adds_nothing():
    by_function = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    found = sum_rewards(by_function, torch.tensor([1.0, 0.5])).tolist()
    assert found[:2] == [2.0, 1.0]
    assert found[2] != found[2]


def test_the_penalty_is_of_the_tokens_that_count():
    old = torch.tensor([[-1.0, -2.0, -9.0]])
    reference = torch.tensor([[-1.5, -1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    found = penalise(torch.tensor([1.0]), old, reference, mask, 0.1)
    assert found.item() == pytest.approx(1.0 - 0.1 * (0.5 - 1.0))


def test_even_groups_are_found():
    rewards = [1.0, 1.0, 1.0, NAN, 0.0, 1.0, 1.0, 1.0, NAN, NAN, NAN, 2.0]
    assert find_even_groups(torch.tensor(rewards), 4).tolist() == [True, False, True]


@pytest.mark.parametrize(("count", "group", "named"), [(4, 1, "num_generations: 1"), (6, 4, "6 ")])
def test_no_whole_groups_are_refused(count, group, named):
    with pytest.raises(InvalidRequest, match=named):
        group_advantages(torch.zeros(count), group, Policy())
