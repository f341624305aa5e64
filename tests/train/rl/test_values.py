"""Advantages of tokens and the value's loss, against TRL 1.12's PPOTrainer in plain numbers.

The source is `trl/experimental/ppo/ppo_trainer.py` of 1.12.0, from "4. compute rewards" to the
advantages and returns, and from "vpredclipped" to "vf_clipfrac"; no later version has them.
"""

import math

import pytest
import torch

from memfit.train.rl.values import (
    NOT_COUNTED,
    Aims,
    count_tokens,
    estimate,
    find_places,
    gather_places,
    spread_places,
    value_loss,
    whiten,
)

MOST = 6
LENGTHS = torch.tensor([6, 1, 4, 5])
KNOBS = {"beta": 0.05, "gamma": 0.9, "decay": 0.95}


def make(seed=0):
    random = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), MOST)
    scores = torch.randn(len(LENGTHS), generator=random, dtype=torch.float64)
    old, reference = -torch.rand(2, *shape, generator=random, dtype=torch.float64)
    values = torch.randn(shape, generator=random, dtype=torch.float64)
    return scores, old, reference, values


def restated(scores, old, reference, values, lengths, *, beta, gamma, decay):
    """Plain numbers, one row and place at a time."""
    gains, returns = [], []
    for row, length in enumerate(lengths.tolist()):
        real = [float(v) if at <= length else 0.0 for at, v in enumerate(values[row])]
        rewards = [0.0] * MOST
        for at in range(length):
            rewards[at] = -beta * float(old[row, at] - reference[row, at])
        rewards[length if length < MOST else length - 1] += float(scores[row])
        running, own = 0.0, [0.0] * MOST
        for at in reversed(range(MOST)):
            after = real[at + 1] if at + 1 < MOST else 0.0
            running = rewards[at] + gamma * after - real[at] + gamma * decay * running
            own[at] = running
        gains.append(own)
        returns.append([own[at] + real[at] if at <= length else 0.0 for at in range(MOST)])
    counted = [gains[r][t] for r, n in enumerate(lengths.tolist()) for t in range(n)]
    mean = sum(counted) / len(counted)
    spread = sum((x - mean) ** 2 for x in counted) / (len(counted) - 1)
    white = [
        [(x - mean) / math.sqrt(spread + 1e-8) if t < n else 0.0 for t, x in enumerate(own)]
        for own, n in zip(gains, lengths.tolist(), strict=True)
    ]
    return torch.tensor(white, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_returns_are_trls(seed):
    found = estimate(*make(seed), LENGTHS, **KNOBS)
    advantages, returns = restated(*make(seed), LENGTHS, **KNOBS)
    torch.testing.assert_close(found.advantages, advantages, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns, returns, rtol=0, atol=1e-12)


def test_a_score_is_given_behind_the_last_token_where_there_is_room():
    scores, old, _, values = make()
    found = estimate(scores, old, None, values, LENGTHS, **KNOBS)
    given = found.rewards.nonzero().tolist()
    assert given == [[0, 5], [1, 1], [2, 4], [3, 5]]
    torch.testing.assert_close(found.rewards.sum(1), scores)


def test_without_decay_an_advantage_is_what_one_step_surprises_by():
    """lambda 0: equation 10 of 1506.02438; lambda 1 and gamma 1: rewards to come less the value."""
    scores, old, reference, values = make()
    lengths = torch.full((4,), MOST)
    one = estimate(scores, old, reference, values, lengths, beta=0.1, gamma=0.9, decay=0.0)
    after = torch.cat((values[:, 1:], torch.zeros(4, 1, dtype=values.dtype)), 1)
    torch.testing.assert_close(one.returns, one.rewards + 0.9 * after)
    all_ = estimate(scores, old, reference, values, lengths, beta=0.1, gamma=1.0, decay=1.0)
    torch.testing.assert_close(all_.returns, all_.rewards.flip(1).cumsum(1).flip(1))


def test_whitening_is_of_what_counts_and_a_single_number_is_none():
    x = torch.tensor([[1.0, 5.0, 99.0], [3.0, -99.0, -99.0]], dtype=torch.float64)
    counted = torch.tensor([[True, True, False], [True, False, False]])
    found = whiten(x, counted)
    assert found[~counted].tolist() == [0.0, 0.0, 0.0]
    assert found[counted].mean() == pytest.approx(0.0, abs=1e-12)
    assert found[counted].var() == pytest.approx(1.0, rel=1e-6)
    alone = whiten(x, torch.zeros_like(counted).index_put((torch.tensor(0), torch.tensor(0)),
                                                          torch.tensor(True)))  # fmt: skip
    assert alone.tolist() == torch.zeros_like(x).tolist()


def losses(values, old, returns, lengths, clip):
    """Of each place that is learned: both squares by plain autograd."""
    found = []
    for row, length in enumerate(lengths.tolist()):
        for at in range(min(length + 1, MOST)):
            v, kept, goal = values[row, at], old[row, at], returns[row, at]
            bound = torch.clamp(v, kept - clip, kept + clip)
            found.append(torch.max((v - goal) ** 2, (bound - goal) ** 2))
    return torch.stack(found)


def aims_of(old, returns, lengths, count, clip):
    places = count_tokens(lengths + 1, MOST).to(old)
    return Aims(old, returns, places, count, clip, 0.1)


@pytest.mark.parametrize("clip", [0.2, 0.01])
def test_the_values_loss_and_slope_are_trls(clip):
    *_, old = make(1)
    returns = make(2)[3]
    values = (old + 0.3 * make(3)[3]).requires_grad_()
    each = losses(values, old, returns, LENGTHS, clip)
    expected = 0.1 * 0.5 * each.mean()
    (slope,) = torch.autograd.grad(expected, values)
    count = int(count_tokens(LENGTHS + 1, MOST).sum())
    assert count == len(each) == 6 + 2 + 5 + 6
    found = value_loss(values, aims_of(old, returns, LENGTHS, count, clip))
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(torch.autograd.grad(found.loss, values)[0], slope)
    free = torch.stack([
        (values[r, t] - returns[r, t]) ** 2 for r, n in enumerate(LENGTHS.tolist())
        for t in range(min(n + 1, MOST))
    ])  # fmt: skip
    assert found.sums.tolist() == pytest.approx(
        [int((each > free).sum()), count, float(each.detach().sum())]
    )
    assert 0 < found.sums[0] < count


def test_how_a_rollout_is_cut_changes_nothing():
    *_, old = make(1)
    returns = make(2)[3]
    values = (old + 0.3 * make(3)[3]).requires_grad_()
    count = int(count_tokens(LENGTHS + 1, MOST).sum())
    whole = value_loss(values, aims_of(old, returns, LENGTHS, count, 0.2)).loss
    parts = [
        value_loss(values[at], aims_of(old[at], returns[at], LENGTHS[at], count, 0.2)).loss
        for at in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)
    (a,), (b,) = (torch.autograd.grad(x, values) for x in (whole, sum(parts)))
    torch.testing.assert_close(a, b)


def test_white_rewards_have_variance_one_and_keep_their_mean():
    """As `masked_whiten` of TRL without its shift, over all places whose values are learned."""
    scores, old, reference, values = make()
    plain = estimate(scores, old, reference, values, LENGTHS, **KNOBS).rewards
    white = estimate(scores, old, reference, values, LENGTHS, **KNOBS, white_rewards=True).rewards
    places = count_tokens(LENGTHS + 1, MOST)
    mean = plain[places].mean()
    expected = (plain - mean) * torch.rsqrt(plain[places].var() + 1e-8) + mean
    torch.testing.assert_close(white[places], expected[places])
    assert not white[~places].any()


def test_an_answer_that_does_not_count_moves_nothing():
    scores, old, reference, values = make()
    lengths = LENGTHS.clone()
    lengths[1] = NOT_COUNTED
    rest = [0, 2, 3]
    found = estimate(scores, old, reference, values, lengths, **KNOBS)
    alone = estimate(scores[rest], old[rest], reference[rest], values[rest], LENGTHS[rest], **KNOBS)
    for all_, those in zip(found, alone, strict=True):
        torch.testing.assert_close(all_[rest], those)
        assert not all_[1].any()


def test_places_of_a_row_begin_where_its_first_token_is_predicted():
    starts, width = torch.tensor([1, 3, 2, 4]), 10
    rows = torch.arange(40.0).view(4, width)
    places = find_places(starts, MOST)
    cut = gather_places(rows, places)
    assert cut[:, 0].tolist() == [0, 12, 21, 33]
    assert cut[3].tolist() == [33, 34, 35, 36, 37, 38]
    back = spread_places(cut, places, width)
    inside = torch.zeros(4, width, dtype=torch.bool).scatter(
        1, places, torch.tensor(True).expand(4, MOST)
    )
    torch.testing.assert_close(back, rows * inside)
    # a place behind the row is nowhere
    late = find_places(torch.tensor([7] * 4), MOST)
    assert gather_places(rows, late)[:, -1].tolist() == [9, 19, 29, 39]
    assert spread_places(torch.ones(4, MOST), late, width).sum(1).tolist() == [4.0] * 4
