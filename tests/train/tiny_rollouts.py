"""A tiny run that samples answers: its data, its reward functions and its recipe."""

import json
from pathlib import Path

from tiny_runs import CONFIG, tiny_recipe

from memfit.records.recipe import Lora
from memfit.records.reinforcement import Policy, RewardSettings, Rollout
from memfit.records.request import Request, Task
from memfit.train.run.loop import Cadence, train

REWARDS = '''
def digits(completions, **_):
    """The share of an answer's characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def short(completions, completion_ids, wanted, **_):
    """A further column of the data is read."""
    return [-abs(len(i) - w) / 10 for i, w in zip(completion_ids, wanted)]
'''
ROLLOUT = Rollout(num_generations=4, max_prompt_length=12, max_completion_length=6)
LORA = {"method": "lora", "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))}


def write_data(folder: Path, prompts: int = 24) -> Path:
    """A folder with prompts and reward functions; the path of the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": f"Say {n}:", "answer": str(n), "wanted": n % 5} for n in range(prompts)]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    (folder / "rewards.py").write_text(REWARDS)
    return file


def recipe_of(folder: Path, objective: str = "grpo", **changes):
    """Its rewards are those of `write_data`."""
    names = ("digits", "short")
    funcs = tuple(f"{folder / 'rewards.py'}:{name}" for name in names)
    values = {
        "objective": objective, "packing": False, "sequence_length": ROLLOUT.width,
        "rollout": ROLLOUT, "reward": RewardSettings(funcs=funcs, weights=(1.0, 0.5)),
        "policy": Policy(), "micro_batch": 8, "accumulation": 2, "steps": 5,
        "optimizer": {"warmup_steps": 0}, **changes,
    }  # fmt: skip
    return tiny_recipe(**values)


def run(recipe, file: Path, folder: Path, cache: Path, *, save_every: int = 2, **more):
    """Train; the same call goes on."""
    request = Request(model=CONFIG, task=Task(objective=recipe.objective, data=str(file)))
    cadence = Cadence(save_every=save_every, watch_every=50)
    return train(recipe, request, folder, cadence=cadence, cache=cache, **more)
