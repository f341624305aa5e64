"""Iterations that sample answers, on this CPU's ranks: what rank_worker.py runs of such recipes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from msgspec.structs import replace
from tiny_steps import CONFIGS

from memfit.records.ledger import Phase
from memfit.records.recipe import Lora, Parallel, Recipe
from memfit.records.reinforcement import Policy, RewardSettings, Rollout, find_online
from memfit.train.distributed.gloo import without_gloo
from memfit.train.distributed.ranks import Joined, Place, Ranks
from memfit.train.measure.live import LiveBytes
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rehearsal import Constant, rehearse
from memfit.train.rl.rewards.process import Judged
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.rl.sampling import sample_in_slots
from memfit.train.step.build import Built, build_optimizer

END = 3  # the token that ends an answer: ranks take different numbers of steps
PROMPTS = 6
# not all answers are in flight at once, and a group's last ones wait for a slot
ROLLOUT = Rollout(
    num_generations=4, max_prompt_length=10, max_completion_length=12, rows=3, temperature=0.9
)
LORA = {"method": "lora", "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))}
SAMPLED: dict[str, dict[str, Any]] = {
    "GRPO": {**LORA, "objective": "grpo", "policy": Policy(beta=0.1, scale_rewards="batch")},
    "RLOO": {
        "objective": "rloo", "policy": Policy(num_iterations=2, normalize_advantages=True),
    },
    "GRPO, other prompts for ties": {
        "objective": "grpo", "policy": Policy(loss_type="grpo"),
        "rollout": replace(ROLLOUT, dynamic_sampling=2),
    },
    "GRPO, states of rows": {
        **LORA, "objective": "grpo", "policy": Policy(beta=0.1), "config": CONFIGS["qwen3_5_text"],
    },
    "RLOO, a reference": {**LORA, "objective": "rloo", "policy": Policy(beta=0.1)},
}  # fmt: skip
FIGURES = (
    "loss", "reward", "reward_std", "sampled_reward", "even_groups", "length", "truncated", "kl",
    "grad_norm", "entropy", "clipped_low", "clipped_high",
)  # fmt: skip


def changes_of(technique: str, parallel: Parallel) -> dict[str, Any]:
    """What a recipe says: always 8 answers of all ranks."""
    own = SAMPLED[technique]
    return {
        "rollout": ROLLOUT, "sequence_length": ROLLOUT.width, "parallel": parallel,
        "reward": RewardSettings(funcs=("number",)), "micro_batch": 2,
        "accumulation": 4 // parallel.dp, **own,
    }  # fmt: skip


class Varied(Constant):
    """A judge whose reward is a function of an answer's tokens alone; some answers have none."""

    def judge(self, prompts: Any, completions: Any, completion_ids: Any, columns: Any) -> Judged:
        found = [sum(ids) % 7 / 7.0 if sum(ids) % 5 else None for ids in completion_ids]
        return Judged(tuple(found), Counter({"raised": found.count(None)}))


def learning_of(recipe: Recipe, ranks: Ranks) -> Learning:
    """Prompts of different lengths, judged by `Varied`."""
    prompts = [Prompt([5 + n, 6, *([7] * (n % 4))], {"prompt": str(n)}) for n in range(PROMPTS)]
    judges = Judges(recipe.reward, start=Varied)
    groups = recipe.global_batch // recipe.rollout.num_generations
    sampling = Sampling(
        recipe.rollout, prompts, groups, judges, str, sample_in_slots, END, 0, ranks=ranks
    )
    return Learning(find_online(recipe.objective), recipe.policy, sampling)


def ranks_of(recipe: Recipe, rank: int) -> Ranks:
    """The processes of this one's group."""
    world = recipe.parallel.world
    return Joined(Place(rank, world, rank), None) if world > 1 else Ranks()


def watch(built: Built, live: LiveBytes) -> dict[str, Any]:
    """What a rehearsal's iterations held, by phase and kind."""
    gc.collect()
    gc.disable()
    try:
        with live, without_gloo(live):
            rehearse(built, live)
    finally:
        gc.enable()
    phases = {p: n for p, n in live.peaks.items() if p is not Phase.LOAD}
    return {"phases": phases, "kinds": {p: live.ledger().by_kind(p) for p in phases}}


def run(recipe: Recipe, model: torch.nn.Module, rank: int) -> dict[str, Any]:
    """Two iterations: figures, answers, and the gradients of each update."""
    built = Built(recipe, model, build_optimizer(recipe, model))
    gradients: list[dict[str, torch.Tensor]] = []

    def look(*_: Any) -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(
            {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone()
             for n, g in found.items()}
        )  # fmt: skip

    built.optimizer.register_step_pre_hook(look)
    learning = learning_of(recipe, ranks_of(recipe, rank))
    found = [iterate(built, learning, index) for index in range(2)]
    return {
        "figures": [{k: s.figures[k] for k in FIGURES if k in s.figures} for s in found],
        "failures": [s.failures for s in found], "samples": [s.samples for s in found],
        "tokens": [s.update_tokens for s in found], "gradients": gradients,
    }  # fmt: skip
