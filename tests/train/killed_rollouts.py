"""Runs that sample answers in processes of their own, which say where they are and can be killed.

Its argument is the objective. It reads `folder data cache` from each line of its input and trains
there in a forked process. Each part of an iteration writes its name to the process's output when it
begins, and `.` when it ends,
so that whoever reads knows when to kill it.
"""

import gc
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from tiny_rollouts import LORA, ROLLOUT, recipe_of, run

from memfit.records.reinforcement import Policy
from memfit.train.rl import learn, rollout
from memfit.train.rl.judging import Judges
from memfit.train.run import loop
from memfit.train.step.build import build_model

STEPS = 24
POLICIES = {  # two updates with a rollout where an objective has them
    "grpo": Policy(beta=0.1, num_iterations=2),
    "online_dpo": Policy(loss_type="sigmoid", beta=0.1),
    "ppo": Policy(beta=0.05, num_iterations=2),
    "ppo_full": Policy(beta=0.05, num_iterations=2),  # a value model and a frozen reference
}
GENERATIONS = {"grpo": 4, "online_dpo": 2, "ppo": 1, "ppo_full": 1}


def changes_of(objective):
    """An iteration of each part that there is: KL, answers in two waves."""
    rollout = structs.replace(
        ROLLOUT, rows=8, max_completion_length=12, num_generations=GENERATIONS[objective]
    )
    return {
        **({} if objective == "ppo_full" else LORA), "steps": STEPS,
        "policy": POLICIES[objective], "rollout": rollout, "sequence_length": 24,
    }  # fmt: skip


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def telling(name, work):
    """`work`, whose beginning and end are said."""

    def told(*arguments, **named):
        say(name)
        try:
            return work(*arguments, **named)
        finally:
            say(".")

    return told


def tell_parts(objective: str) -> None:
    """Make every part of an iteration say when it runs; the rehearsal's are not of a run."""
    begin = loop.take_iteration

    def iterate(*arguments):
        if loop.take_iteration is iterate:
            loop.take_iteration = begin
            learn._score = telling("score", learn._score)
            if objective.startswith("ppo"):
                learn._find_target = telling("values", learn._find_target)
            learn.step = telling("update", learn.step)
            Judges.judge = telling("reward", Judges.judge)
            rollout._sample_and_judge = telling_rollouts(rollout._sample_and_judge)
        return begin(*arguments)

    loop.take_iteration = iterate
    loop.save_checkpoint = telling("save", loop.save_checkpoint)


def telling_rollouts(work):
    def told(built, sampling, *more):
        return work(built, replace(sampling, sample=telling("rollout", sampling.sample)), *more)

    return told


def train(objective: str, folder: Path, data: Path, cache: Path) -> None:
    tell_parts(objective)
    recipe = recipe_of(data.parent, objective.removesuffix("_full"), **changes_of(objective))
    run(recipe, data, folder, cache, save_every=2)


def main() -> None:
    assert torch.get_num_threads() == 1, "OMP_NUM_THREADS=1 is missing"  # see ranks_run.py
    build_model(recipe_of(Path(), **LORA), "cpu")  # imports what is only imported when needed
    gc.freeze()  # which no collection need look at again
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(sys.argv[1], *map(Path, line.split()))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        say(f"began {child}")
        say(f"ended {os.waitpid(child, 0)[1]}")


if __name__ == "__main__":
    main()
