"""An iteration of PPO over answers that are given, by memfit; `trl_ppo.py` beside it has TRL's.

What is compared begins with the answers. Policy and value are adapters of a base, and the reference
is the base without them; where all weights are trained, all three are models. The updates are plain
gradient descent, so that rounding stays as small as it is.
"""

from collections import Counter

import numpy as np
import torch
from msgspec.structs import replace

from memfit.records.recipe import Lora
from memfit.records.reinforcement import Policy, RewardSettings, Rollout, ValueSettings
from memfit.train.generation.settings import Completion
from memfit.train.rl import learn, values
from memfit.train.rl.judging import Judges
from memfit.train.rl.rehearsal import Constant
from memfit.train.rl.rewards.process import Judged
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.step.build import Built
from other_trainers.shared import END, LONGEST
from tiny_models import draw_answers, make_built, make_recipe

PROMPTS = ([5, 6, 7], [8, 9, 3, 4, 6], [7], [3, 9], [4, 4, 8, 6], [9, 8], [6], [3, 4, 5])
LENGTHS = (3, 6, 1, 4, 6, 2, 5, 6)  # of answers; 6 is the limit
SCORES = (1.0, -0.5, 2.0, 0.25, 3.0, 0.0, -1.0, 0.5)
RATE = 0.05  # of plain gradient descent
CASES = {
    "as they come": {},
    "one update": {"num_ppo_epochs": 1},
    "discounted": {"gamma": 0.9, "lam": 0.7},
    "clipped": {"cliprange": 0.01, "cliprange_value": 0.01, "vf_coef": 0.5},
    "kl": {"kl_coef": 0.5},
    "no kl": {"kl_coef": 0.0},
    "white rewards": {"whiten_rewards": True},
    "missing end": {"missing_eos_penalty": 1.5},
    "warm": {"temperature": 1.3},
    "all weights": {},
    "all weights, clipped": {"cliprange": 0.01, "cliprange_value": 0.01, "vf_coef": 0.5},
}  # fmt: skip
USUAL = {"num_ppo_epochs": 4, "kl_coef": 0.05, "temperature": 0.7}


def make_answers():
    return draw_answers(LENGTHS, LONGEST, END)


def is_whole(case):
    """Whether all weights of policy and value are trained."""
    return case.startswith("all weights")


def make(*, whole=False, moved=True):
    """memfit's model; moved: away from the start, at which the policy is the reference, and of all
    weights the value, too, but for its head."""
    rollout = Rollout(num_generations=1, max_prompt_length=5, max_completion_length=LONGEST)
    recipe = make_recipe(
        "llama", method="full" if whole else "lora", objective="ppo", micro_batch=len(PROMPTS),
        rollout=rollout, policy=Policy(beta=0.05), sequence_length=rollout.width,
        lora=Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj")),
    )  # fmt: skip
    built = make_built(replace(recipe, optimizer=replace(recipe.optimizer, clip_norm=0.0)))
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if moved and (".lora_B." in name or name.endswith("score.weight")):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
            elif moved and whole:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=random))
    return built


class Descent(torch.optim.SGD):
    """Plain gradient descent that keeps the gradients of every update."""

    def __init__(self, named):
        self.named, self.seen = dict(named), []
        super().__init__(self.named.values(), lr=RATE)

    def step(self, *_):
        self.seen.append({n: p.grad.clone() for n, p in self.named.items() if p.grad is not None})
        super().step()


class Scores(Constant):
    """Stated rewards of each prompt."""

    def judge(self, prompts, completions, completion_ids, columns):
        return Judged(tuple(SCORES[int(prompt)] for prompt in prompts), Counter())


def ours(case, answers, cut):
    """Losses, gradients, figures and advantages of memfit's, in micro-batches of `cut` rows."""
    settings, built = CASES[case], make(whole=is_whole(case))
    recipe = replace(built.recipe, micro_batch=cut, accumulation=len(PROMPTS) // cut)
    descent = Descent((n, p) for n, p in built.model.named_parameters() if p.requires_grad)
    built = Built(recipe, built.model, descent)
    told = USUAL | settings
    rollout = replace(recipe.rollout, temperature=told["temperature"])
    prompts = [Prompt(ids, {"prompt": str(n)}) for n, ids in enumerate(PROMPTS)]

    def sample(built, rows, rollout, end, seed):
        found = [answers[PROMPTS.index(ids)] for ids in rows]
        return [
            Completion(ids, [0.0] * len(ids), "stop_token" if ids[-1] == END else "length")
            for ids in found
        ]  # fmt: skip

    judges = Judges(RewardSettings(funcs=("number",)), start=Scores)
    sampling = Sampling(
        rollout, prompts, len(prompts), judges, str, sample, END, 0,
        missing_eos_penalty=told.get("missing_eos_penalty", 0.0),
    )  # fmt: skip
    clip = told.get("cliprange", 0.2)
    policy = Policy(
        beta=told["kl_coef"], epsilon=clip, epsilon_high=clip,
        num_iterations=told["num_ppo_epochs"],
    )  # fmt: skip
    own = {k: v for k, v in told.items() if k in ValueSettings.__struct_fields__}
    learning = learn.Learning("ppo", policy, sampling, ValueSettings(**own))
    losses, advantages, orders = [], [], []
    plain, rough, sampler = learn.step, values.estimate, learn.roll_out

    def step(*given):
        result = plain(*given)
        losses.append(float(result.loss))
        return result

    def estimate(*given, **settings):
        made = rough(*given, **settings)
        advantages.append(made.advantages)
        return made

    def roll_out(*given):
        experience = sampler(*given)
        orders.extend(int(p.columns["prompt"]) for p in experience.prompts)
        return experience

    learn.step, values.estimate, learn.roll_out = step, estimate, roll_out
    try:
        figures = learn.iterate(built, learning, 0).figures
    finally:
        learn.step, values.estimate, learn.roll_out = plain, rough, sampler
    back = torch.tensor(np.argsort(orders))
    return losses, descent.seen, figures, advantages[0][back]


def fingerprint(gradients):
    """Of each gradient its sum by weights that tell its numbers apart."""
    return {
        name: float((g.flatten().double() * torch.arange(1.0, g.numel() + 1).double().cos()).sum())
        for name, g in gradients.items()
    }
