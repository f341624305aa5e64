"""Runs that sample answers on ranks of this CPU: each a forked process.

A rank may end itself by `kill -9` within a part of its third iteration.
"""

import os
import signal
from pathlib import Path

from ranks_run import fork_ranks
from tiny_rollouts import LORA, recipe_of
from tiny_runs import CONFIG

from memfit.records.recipe import Parallel, Recipe
from memfit.records.reinforcement import Policy
from memfit.records.request import Request, Task
from memfit.train.distributed import stragglers
from memfit.train.distributed.ranks import find_place, join
from memfit.train.rl import learn, rollout
from memfit.train.run import loop
from memfit.train.run.loop import Cadence

KILLED = 2  # the index of the iteration


def recipe_on(folder: Path, world: int) -> Recipe:
    """Always 16 answers of all ranks, four iterations, and a reference beside the policy."""
    return recipe_of(
        folder, **LORA, policy=Policy(beta=0.1), micro_batch=4, accumulation=4 // world, steps=4,
        parallel=Parallel(dp_shard=world),
    )  # fmt: skip


def end_within(part: str) -> None:
    """This process ends where that part of the iteration begins."""
    begin = loop.take_iteration
    module, name = {"rollout": (rollout, "judge_answers"), "update": (learn, "step")}[part]

    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def take(session, learning, built, index):
        if index == KILLED:
            setattr(module, name, end)
        return begin(session, learning, built, index)

    loop.take_iteration = take


def train(world: int, folder: Path, data: Path, cache: Path) -> None:
    recipe = recipe_on(data.parent, world)
    place = find_place()
    task = Task(objective="grpo", data=str(data), evaluation=str(data.parent / "held_out.jsonl"))
    request = Request(model=CONFIG, task=task)
    asked = {"cadence": Cadence(save_every=2, evaluate_every=2, watch_every=50), "cache": cache}
    if place is None:
        loop.train(recipe, request, folder, **asked)
        return
    stragglers.Waiting.due = lambda *_: False  # half a second of each rank
    with join(place, "cpu") as ranks:
        loop.train(recipe, request, folder, ranks=ranks, **asked)


def be_rank(world: int, folder: Path, killed: int, part: str, data: Path, cache: Path) -> None:
    if os.environ.get("RANK") == str(killed):
        end_within(part)
    train(world, folder, data, cache)


def run(world: int, *order: object) -> list[int | None]:
    """How the ranks ended. order: as `be_rank`; the killed rank -1 is none of them."""
    ranks = fork_ranks(world, be_rank, world, *order)
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]
