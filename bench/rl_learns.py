"""A tiny model that learns a reward that can be verified, on this CPU, by typed commands.

    python bench/rl_learns.py [--seeds N] [--seed N] [--objective NAME] [--update]

The task is that of `recipes/next-digit_grpo_cpu.yaml`: the digit after another one, from random
weights. Each row is one `memfit train` of the recipe with another seed and objective, the settings
of which are `SETTINGS`, one thread, planning and certificate included. PPO's policy and value are
adapters, which leave the head as it is: one of random weights gives no token more than a chance of
two in a hundred, whatever an adapter makes of the blocks. So it has a base, which another
`memfit train` before it makes of `TALK`, and which answers at random: its seconds are counted, too.
What a row says: the mean reward of the first rollout, that of the last ten, and seconds of the
processor for all commands, rewards included. Where groups of equal rewards are left out, rewards
are of all answers that were sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from memfit.records import write_atomically

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rl_learns.json"
RECIPE = HERE.parent / "recipes" / "next-digit_grpo_cpu.yaml"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OBJECTIVES = ("grpo", "rloo", "ppo", "online_dpo")
# What differs from the recipe. RLOO's advantages are not divided by a group's deviation: one right
# answer of 64 counts 1, where GRPO's counts 7.9. At the recipe's rate prompts that are learned
# already move the shared weights until a right answer to a slow one is sampled no more; with half
# of the rate it is. A rate that falls keeps what was learned, where few answers still err.
#
# Online DPO compares two answers to a prompt, and the base is its reference. Of random weights one
# pair of 100 has a right answer, and of those that say digits one of 5; pairs of equal rewards pull
# the chances of both answers back to the reference's. So a digit counts a little, too, which orders
# one pair of 12 from the start; up to four further rounds of prompts take the place of equal pairs;
# adapters reach the head; and beta is large enough that prompts that are learned are pushed no
# further. With 0.05, and in one of three seeds with 0.2, a prompt ended certain of a wrong answer.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "rloo": {
        "task": {"steps": 300}, "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
    },
    # four updates with each of fewer answers, which cost more than sampling does; with PPO's own
    # kl_coef of 0.05 one or two prompts ended certain of a wrong answer in two of five seeds
    "ppo": {
        "task": {"global_batch": 144, "steps": 100}, "lora": {"rank": 16, "targets": "all-linear"},
        "ppo": {"kl_coef": 0.2},
        "rollout": {"num_generations": 16, "temperature": 1.0},
        "optimizer": {"learning_rate": 5e-3, "schedule": "linear"},
    },
    "online_dpo": {
        "task": {"steps": 200, "global_batch": 288}, "policy": {"beta": 0.5},
        "rollout": {
            "num_generations": 2, "max_completion_length": 1, "temperature": 1.0,
            "dynamic_sampling": 4,
        },
        "reward": {"funcs": ["number", "regex:[0-9]"], "weights": [0.9, 0.1]},
        "lora": {"rank": 16, "alpha": 32, "targets": [*PROJECTIONS, "lm_head"]},
        "optimizer": {"learning_rate": 3e-3, "schedule": "linear"},
    },
}  # fmt: skip
DIGITS = range(1, 10)
# what a base is trained of: any digit after a sum, the right one four times as often as another;
# and each digit after itself, which parts the rows of the head from each other
TALK = [
    *[{"prompt": f"{n}+1=", "completion": str(d)}
      for n in range(9) for d in [*DIGITS, *[n + 1] * 3]],
    *[{"prompt": str(d), "completion": str(d)} for d in DIGITS for _ in range(4)],
]  # fmt: skip
BASE: dict[str, Any] = {
    "task": {"objective": "sft", "data": "talk.jsonl", "global_batch": len(TALK), "steps": 200,
             "sequence_length": 8, "packing": False},
    "optimizer": {"learning_rate": 1e-2, "schedule": "linear", "beta2": 0.99},
}  # fmt: skip
ADAPTED = ("ppo",)  # objectives that begin with the base
METHODS = {"online_dpo": "lora"}
COPIES = {"online_dpo": 16}  # lines with the same prompt: a rollout asks each line once at most
OF_ALL = "sampled_reward"  # of all answers, where some are left out
LAST = 10  # rollouts whose mean reward is what was learned


def learn(
    objective: str,
    seed: int,
    folder: Path,
    *,
    steps: int | None = None,
    train: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Write the recipe's data, train by typed commands, and read the log.

    train: what trains `request.yaml` of a folder into its `run`, instead of a process of its own.
    """
    train = train or _train_alone
    text = RECIPE.read_text()
    found = re.search(r'python -c "(.*)" > prompts.jsonl', text)
    assert found is not None
    made = subprocess.run([sys.executable, "-c", found[1]], capture_output=True, check=True)
    write_atomically(folder / "prompts.jsonl", made.stdout * COPIES.get(objective, 1))
    request = {**yaml.safe_load(text), "seed": seed}
    request["method"] = METHODS.get(objective, request["method"])
    for section, values in SETTINGS.get(objective, {}).items():
        request[section] = request.get(section, {}) | values
    request["task"] |= {"objective": objective} | ({} if steps is None else {"steps": steps})
    start = _cpu_seconds()
    if objective in ADAPTED:
        talk = "".join(json.dumps(row) + "\n" for row in TALK)
        write_atomically(folder / "talk.jsonl", talk.encode())
        kept = ("model", "weights", "method", "precision", "hardware", "limits", "seed")
        base = {name: request[name] for name in kept} | BASE
        write_atomically(folder / "base.yaml", yaml.safe_dump(base).encode())
        _train_alone(folder, "base.yaml", "base")
        request |= {"model": "base/model", "method": "lora"}
        del request["weights"]
    write_atomically(folder / "request.yaml", yaml.safe_dump(request).encode())
    train(folder)
    log = map(json.loads, (folder / "run" / "log.jsonl").read_text().splitlines())
    rewards = [line.get(OF_ALL, line["reward"]) for line in log if "reward" in line]
    return {
        "objective": objective, "seed": seed, "steps": len(rewards), "before": rewards[0],
        "after": statistics.mean(rewards[-LAST:]), "cpu_seconds": _cpu_seconds() - start,
    }  # fmt: skip


def _train_alone(folder: Path, request: str = "request.yaml", into: str = "run") -> None:
    command = [sys.executable, "-m", "memfit", "train", request, "--folder", into]
    told = subprocess.run(
        [*command, "--quiet"], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if told.returncode:
        raise SystemExit(f"{' '.join(command)} exits with {told.returncode}:\n{told.stderr}")


def _cpu_seconds() -> float:
    """Of the processes that this one has waited for: other work here does not count."""
    spent = os.times()
    return spent.children_user + spent.children_system


def main() -> None:
    """Run all seeds of each objective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="so many, from 0 on")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--objective", choices=OBJECTIVES)
    parser.add_argument("--update", action="store_true")
    asked = parser.parse_args()
    for objective in [asked.objective] if asked.objective else OBJECTIVES:
        for seed in range(asked.seeds) if asked.seed is None else [asked.seed]:
            with tempfile.TemporaryDirectory() as folder:
                row = learn(objective, seed, Path(folder))
            print(json.dumps(row), flush=True)
            if asked.update:
                _write(row)


def _write(row: dict[str, Any]) -> None:
    """In place of the row of the same objective and seed."""
    rows = json.loads(RESULTS.read_text())["rows"]
    new = row["objective"], row["seed"]
    rows = [old for old in rows if (old["objective"], old["seed"]) != new] + [row]
    rows.sort(key=lambda one: (OBJECTIVES.index(one["objective"]), one["seed"]))
    made = {"python": platform.python_version(), "torch": torch.__version__, "rows": rows}
    write_atomically(RESULTS, (json.dumps(made, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
