"""The policy's loss against its published formulas, written out in fp64 and differentiated.

Ratios, advantages and lengths are drawn so that every clause of a formula decides somewhere: a
wrong advantage, clip, mask or KL estimate turns a test of its name red.
"""

import pytest
import torch

from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import Policy
from memfit.train.rl.policy_loss import Answers, Counts, policy_loss

ROWS, TOKENS, LONGEST = 6, 7, 7


def make(seed=0, rows=ROWS):
    random = torch.Generator().manual_seed(seed)

    def draw(scale):
        return scale * torch.randn(rows, TOKENS, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, TOKENS + 1, (rows, 1), generator=random)
    mask = (torch.arange(TOKENS) < lengths).double()
    mask[1] = 0  # an answer that was cut short and does not count
    mask[0, 0] = mask[3, 0] = 0  # tokens of an answer that do not count
    new = (draw(1.0) - 3) * (torch.arange(TOKENS) < lengths)
    old = (new + draw(0.4)) * (torch.arange(TOKENS) < lengths)
    reference = (new + draw(0.5)) * (torch.arange(TOKENS) < lengths)
    advantages = torch.randn(rows, generator=random, dtype=torch.float64)
    advantages[2] = 0
    return new, old, reference, mask, advantages


def textbook(new, old, reference, mask, advantages, policy, objective):
    """One line a formula; the sums are divided as each paper divides them."""
    a, log_ratio = advantages[:, None], new - old
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    if objective == "rloo":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True)
    elif policy.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - policy.epsilon, 1 + policy.epsilon_high)
    capped = ratio.clamp(max=policy.delta) if policy.delta else ratio
    losses = -torch.min(capped * a, clipped * a)
    if objective == "rloo":
        return losses.mean()
    if policy.beta:
        k3 = (reference - new).exp() - (reference - new) - 1
        losses = losses + policy.beta * k3 * (ratio if policy.use_bias_correction_kl else 1)
    if policy.loss_type == "grpo":
        return ((losses * mask).sum(1, keepdim=True) / lengths).mean()
    if policy.loss_type == "dr_grpo":
        return (losses * mask).sum() / (len(mask) * LONGEST)
    return (losses * mask).sum() / mask.sum()


def answers_of(drawn, policy, objective, rows=slice(None)):
    _, old, reference, mask, advantages = drawn
    counts = Counts(len(mask), float(mask.sum()), LONGEST)
    return Answers(
        objective, policy, counts, 1.0, mask[rows], advantages[rows], old[rows],
        reference[rows] if policy.beta else None,
    )  # fmt: skip


CASES = {
    "advantage": Policy(),
    "clip": Policy(epsilon=0.1, epsilon_high=0.3),
    "clip, two-sided": Policy(epsilon=0.1, epsilon_high=0.1, delta=1.3),
    "mask": Policy(loss_type="grpo"),
    "mask, dr_grpo": Policy(loss_type="dr_grpo"),
    "KL": Policy(beta=0.3),
    "KL without the ratio": Policy(beta=0.3, use_bias_correction_kl=False),
    "GSPO": Policy(importance_sampling_level="sequence", loss_type="grpo"),
    "GSPO, KL": Policy(importance_sampling_level="sequence", beta=0.3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_grpo_is_its_formula(name, seed):
    check(make(seed), CASES[name], "grpo")


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_its_formula(seed):
    check(make(seed), Policy(epsilon=0.15, epsilon_high=0.4), "rloo")


def check(drawn, policy, objective):
    new = drawn[0].clone().requires_grad_()
    expected = textbook(new, *drawn[1:], policy, objective)
    (slope,) = torch.autograd.grad(expected, new)
    mine = drawn[0].clone().requires_grad_()
    told = policy_loss(mine, answers_of(drawn, policy, objective))
    (found,) = torch.autograd.grad(told.loss, mine)
    assert float(told.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert torch.allclose(found, slope, atol=1e-12, rtol=0)


def test_cases_reach_every_clause_of_the_clip():
    """Else a seeded bug in one of them could stay."""
    policy = CASES["clip, two-sided"]
    reached = torch.zeros(2)
    capped = 0
    for seed in range(3):
        drawn = make(seed)
        reached += policy_loss(drawn[0], answers_of(drawn, policy, "grpo")).sums[:2].float()
        capped += int(((drawn[0] - drawn[1]).exp() > policy.delta).sum())
    assert reached.min() > 2
    assert capped > 2


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_add_up_to_the_whole(objective, loss_type):
    drawn = make()
    policy = Policy(loss_type=loss_type, beta=0.1)
    whole = policy_loss(drawn[0], answers_of(drawn, policy, objective))
    parts = [
        policy_loss(drawn[0][at], answers_of(drawn, policy, objective, at))
        for at in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), abs=1e-12)
    assert torch.allclose(sum(part.sums for part in parts), whole.sums)


def test_on_policy_the_ratio_is_one_and_its_slope_is_not_nothing():
    """ℓ - ℓ.detach(): the loss is the mean advantage, the slope REINFORCE's."""
    drawn = make()
    answers = answers_of(drawn, Policy(), "grpo")._replace(old=None)
    new = drawn[0].clone().requires_grad_()
    told = policy_loss(new, answers)
    told.loss.backward()
    expected = -drawn[4][:, None] * drawn[3] / drawn[3].sum()
    assert torch.allclose(new.grad, expected)
    assert told.sums[:2].sum() == 0


def test_what_is_clipped_is_counted():
    """By hand: of ratios 2, 2, 0.5, 0.5 with advantages +, -, +, -, the first and the last are."""
    old = torch.zeros(4, 1, dtype=torch.float64)
    new = torch.tensor([[2.0], [2.0], [0.5], [0.5]], dtype=torch.float64).log()
    mask, advantages = torch.ones(4, 1).double(), torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    answers = Answers("grpo", Policy(), Counts(4, 4.0, 1), 1.0, mask, advantages, old)
    told = policy_loss(new, answers)
    assert told.sums.tolist() == [1.0, 1.0, 0.0, 4.0, 4.0]
    assert float(told.loss) == pytest.approx(-(1.2 - 2 + 0.5 - 0.8) / 4)


def test_a_divisor_of_the_micro_batch_is_refused():
    with pytest.raises(InvalidRequest, match="depends on how a global batch is cut") as caught:
        Policy(loss_type="bnpo")
    assert "dapo" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss_type": "ppo"}, "loss_type: ppo"),
        ({"beta": -0.1}, "beta: -0.1"),
        ({"epsilon": float("nan")}, "epsilon: nan"),
        ({"delta": 1.1}, r"delta: 1.1.* is not above 1 \+ epsilon_high"),
        ({"num_iterations": 0}, "num_iterations: 0"),
    ],
)
def test_a_bad_setting_is_named(changes, named):
    with pytest.raises(InvalidRequest, match=named):
        Policy(**changes)


def test_a_kl_without_a_reference_is_refused():
    drawn = make()
    answers = answers_of(drawn, Policy(beta=0.1), "grpo")._replace(reference=None)
    with pytest.raises(InvalidRequest, match="reference's log-probabilities"):
        policy_loss(drawn[0], answers)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_may_have_advantages_of_their_own(seed):
    """PPO's clipped loss (1707.06347, equation 7), as TRL 1.12's PPOTrainer has it: a mean over
    tokens of max(-A r, -A clip(r))."""
    new, old, _, mask, _ = make(seed)
    random = torch.Generator().manual_seed(seed)
    advantages = torch.randn(new.shape, generator=random, dtype=torch.float64)
    mine, theirs = (new.clone().requires_grad_() for _ in range(2))
    ratio = (theirs - old).exp()
    losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    expected = (losses * mask).sum() / mask.sum()
    answers = Answers(
        "grpo", Policy(), Counts(ROWS, float(mask.sum()), LONGEST), 1.0, mask, advantages, old
    )
    found = policy_loss(mine, answers).loss
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(found, mine)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, theirs)[0])
