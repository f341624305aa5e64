"""Every objective that samples: the base keeps its bits, and who samples knows the chances."""

from collections import Counter

import pytest
import torch
from msgspec.structs import replace

from memfit.records.reinforcement import Policy, RewardSettings, Rollout
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rehearsal import Constant
from memfit.train.rl.rewards.process import Judged
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.rl.rows import lay_out
from memfit.train.rl.sampling import sample_in_slots
from memfit.train.step.step import answer_log_probs
from tiny_models import make_built, make_recipe, start_adapters_at_random

ITERATIONS, ROWS, END = 100, 8, 1
ROLLOUT = Rollout(max_prompt_length=5, max_completion_length=5, rows=4)
SETTINGS = {  # the policy, answers to a prompt, and the temperature
    "grpo": (Policy(beta=0.1, num_iterations=2), 4, 1.0),
    "rloo": (Policy(beta=0.05), 2, 0.8),
    "online_dpo": (Policy(loss_type="sigmoid", beta=0.1), 2, 0.9),
    "ppo": (Policy(beta=0.05, num_iterations=2), 1, 0.7),
}
NF4 = {"precision": "bf16-mixed", "base_format": "nf4"}


class Even(Constant):
    """Rewards answers by their share of even tokens."""

    def judge(self, prompts, completions, completion_ids, columns):
        return Judged(
            tuple(sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids), Counter()
        )


def make(objective, **changes):
    policy, group, temperature = SETTINGS[objective]
    rollout = replace(ROLLOUT, num_generations=group, temperature=temperature)
    recipe = make_recipe(
        "llama", method="lora", objective=objective, micro_batch=4, accumulation=ROWS // 4,
        sequence_length=rollout.width, rollout=rollout, policy=policy, **changes,
    )  # fmt: skip
    built = start_adapters_at_random(make_built(recipe), 2, 0.1)
    prompts = [Prompt([n + 3, n + 4, 2][: 2 + n % 2], {"prompt": str(n)}) for n in range(ROWS)]
    judges = Judges(RewardSettings(funcs=("number",)), start=Even)
    sampling = Sampling(
        rollout, prompts, ROWS // group, judges, lambda _: "", sample_in_slots, END, 3
    )
    return built, Learning(objective, policy, sampling)


def bits_of(built):
    """Of all that is not trained; quantised codes and their scales are buffers or parameters."""
    trained = {name for name, p in built.model.named_parameters() if p.requires_grad}
    found = {n: t for n, t in built.model.state_dict().items() if n not in trained}
    assert found
    return trained, {n: t.detach().clone() for n, t in found.items() if torch.is_tensor(t)}


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        pytest.param("online_dpo", {}, marks=pytest.mark.slow),
        pytest.param("ppo", NF4, marks=pytest.mark.wide),
        *(pytest.param(name, {}, marks=pytest.mark.wide) for name in ("grpo", "rloo", "ppo")),
    ],
)
def test_after_a_hundred_iterations_the_base_has_every_bit(objective, changes):
    built, learning = make(objective, **changes)
    trained, before = bits_of(built)
    learned = {n: p.detach().clone() for n, p in built.model.named_parameters() if n in trained}
    for iteration in range(ITERATIONS):
        iterate(built, learning, iteration)
    again, after = bits_of(built)
    assert again == trained
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    for name, parameter in built.model.named_parameters():
        assert name not in learned or not torch.equal(parameter, learned[name]), name


@pytest.mark.parametrize("objective", SETTINGS)
def test_chances_of_sampled_tokens_are_those_that_are_computed_again(objective):
    """By the forward of the update, adapters on and at the temperature of the sampler; of the
    larger of 1 and the number, as fp32 itself has steps of 5e-7 from 4 to 8."""
    built, learning = make(objective)
    rollout, prompts = learning.sampling.rollout, [p.ids for p in learning.sampling.prompts]
    found = sample_in_slots(built, prompts, rollout, END, 0)
    batch = lay_out(prompts, [c.ids for c in found], rollout.width)
    again = answer_log_probs(built, batch, rollout.temperature).log_probs.double()
    for row, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        start = len(prompt) - 1
        told = torch.tensor(answer.log_probs, dtype=torch.float64)
        gaps = (again[row, start : start + len(answer.ids)] - told).abs()
        assert float((gaps / told.abs().clamp(min=1)).max()) <= 1e-6
