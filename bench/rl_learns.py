"""Tiny models that learn a reward that can be verified, by GRPO and RLOO, on this CPU.

    python bench/rl_learns.py [--seeds N] [--objective grpo|rloo] [--update]

The task: a prompt of four random digits, and an answer of at most four tokens. `digits` pays the
share of four places that hold a digit. The model is a Llama of two blocks with random weights: its
reward before is a random answer's. What a row says: the mean reward of the first rollout, that of
the last ten, and seconds of the processor for the whole run, rewards included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memfit.records import write_atomically
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora, Optimizer, Recipe
from memfit.records.reinforcement import Online, Policy, RewardSettings, Rollout
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.rl.sampling import sample_in_slots
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights

RESULTS = Path(__file__).parent / "results" / "rl_learns.json"
DIGITS, END, VOCAB, LENGTH = 10, 10, 24, 4
REWARDS = """
def digits(completions, **_):
    return [sum(w.isdigit() for w in c.split()) / 4 for c in completions]
"""
STEPS = {"digits": 60}


def make_recipe(seed: int, rows: int, steps: int, rate: float) -> Recipe:
    """A Llama of two blocks, all of it trained."""
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    optimizer = Optimizer(
        name="adamw", implementation="fused", learning_rate=rate, weight_decay=0.0, beta1=0.9,
        beta2=0.99, eps=1e-8, momentum=0.9, schedule="constant", warmup_steps=0, clip_norm=1.0,
    )  # fmt: skip
    return Recipe(
        model=ModelReference(name="tiny", source="", config=config), weights="random",
        objective="sft", method="full", lora=Lora(), freeze=Freeze(), base_format="fp32",
        precision="fp32", optimizer=optimizer, recompute_blocks=0, attention="flash", loss="plain",
        loss_chunk=0, sequence_length=2 * LENGTH, packing=False, micro_batch=rows, accumulation=1,
        steps=steps, device="cpu-x86", seed=seed,
    )  # fmt: skip


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """Four random digits each; token n is the digit n."""
    drawn = np.random.default_rng(seed).integers(0, DIGITS, (count, LENGTH))
    return [Prompt(row.tolist(), {"prompt": " ".join(map(str, row))}) for row in drawn]


def decode(ids: Any) -> str:
    """Digits as themselves, any other token as a letter."""
    return " ".join(str(i) if i < DIGITS else chr(ord("a") + i - DIGITS) for i in ids)


def learn(
    task: str, objective: Online, seed: int, folder: Path, *, steps: int, policy: Policy,
    groups: int = 16, group: int = 8, rate: float = 3e-3,
) -> dict[str, Any]:  # fmt: skip
    """Train once; the rewards on the way and what it took."""
    file = folder / "rewards.py"
    write_atomically(file, REWARDS.encode())
    recipe = make_recipe(seed, groups * group, steps, rate)
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    rollout = Rollout(num_generations=group, max_prompt_length=LENGTH, max_completion_length=LENGTH)
    start, rewards = _cpu_seconds(), []
    with Judges(RewardSettings(funcs=(f"{file}:{task}",))) as judges:
        sampling = Sampling(
            rollout, make_prompts(512, seed), groups, judges, decode, sample_in_slots, END, seed
        )
        learning = Learning(objective, policy, sampling)
        for iteration in range(steps):
            rewards.append(iterate(built, learning, iteration).figures["reward"])
    return {
        "task": task, "objective": objective, "seed": seed, "steps": steps,
        "before": rewards[0], "after": statistics.mean(rewards[-10:]),
        "cpu_seconds": _cpu_seconds() - start,
    }  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for: other work here does not count."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> None:
    """Run all seeds of both objectives."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--objective", choices=("grpo", "rloo"))
    parser.add_argument("--task", choices=tuple(STEPS))
    parser.add_argument("--update", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for task in [asked.task] if asked.task else STEPS:
        for objective in [asked.objective] if asked.objective else ("grpo", "rloo"):
            for seed in range(asked.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    row = learn(
                        task, objective, seed, Path(folder), steps=STEPS[task], policy=Policy()
                    )
                print(json.dumps(row), flush=True)
                rows.append(row)
    if asked.update:
        made = {"python": platform.python_version(), "torch": torch.__version__, "rows": rows}
        write_atomically(RESULTS, (json.dumps(made, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
