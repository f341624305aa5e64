"""Runs that sample answers, killed ten times within each part of an iteration: the bits at the end.

    python bench/rollout_kills.py [OBJECTIVE [SEED]]    writes bench/results/rollout_kills.json

A tiny Llama learns on this CPU, with adapters: by GRPO, groups of four answers; by online DPO,
pairs; by PPO, single answers and a value. `ppo_full` is PPO of all weights, with a value model.
Answers come in two waves of slots, there is a KL divergence, GRPO and PPO make two updates with
each rollout, and every second iteration has a checkpoint. For each part (rollout, reward, score
with reference, PPO's values, update, save) a run is killed by SIGKILL at random moments within that
part, ten times, each time after the same command went on; then it goes on to its end. The claim:
model, log and rewards are those of a run that nobody disturbed, bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests")]

from killed_rollouts import POLICIES, STEPS  # noqa: E402
from rollout_kills import Runs, newest, parts_of, start_runs  # noqa: E402
from test_online_run import weights_of, without_times  # noqa: E402
from tiny_rollouts import write_data  # noqa: E402

from memfit.records import write_atomically  # noqa: E402
from memfit.train.run.logs import read_log  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "rollout_kills.json"
KILLS = 10
ROOM = 6  # steps that a run may take until it is killed


def kill_within(runs: Runs, part: str, home: Path, chance: random.Random) -> dict[str, Any]:
    """Ten kills within a part, and the ends of the runs that were killed.

    A run that is near its end goes on to it, and another one is killed from there on.
    """
    folders = [home / f"{part}0"]
    inside, missed, at_steps = 0, 0, []
    while inside < KILLS:
        hit = runs.kill(folders[-1], part, chance)
        inside, missed = inside + hit, missed + (not hit)
        if hit:
            at_steps.append(len(read_log(folders[-1])))
        if newest(folders[-1]) >= STEPS - ROOM and inside < KILLS:
            runs.whole(folders[-1])
            folders.append(home / f"{part}{len(folders)}")
    runs.whole(folders[-1])
    whole = home / "whole"
    expected = without_times(read_log(whole))
    return {
        "kills": inside, "kills_after_the_part": missed, "steps_logged": at_steps,
        "runs": len(folders),
        "weights_bit_equal": all(weights_of(f) == weights_of(whole) for f in folders),
        "logs_equal": all(without_times(read_log(f)) == expected for f in folders),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    objectives = sys.argv[1:2] or list(POLICIES)
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    for objective in objectives:
        written = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        answer = written | {objective: kill_all(objective, seed)}
        write_atomically(RESULTS, (json.dumps(answer, indent=1) + "\n").encode())


def kill_all(objective: str, seed: int) -> dict[str, Any]:
    """Ten kills in each part of an iteration of an objective."""
    chance = random.Random(seed)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with start_runs(write_data(home / "data"), home / "cache", objective) as runs:
            runs.whole(home / "whole")
            for part in parts_of(objective):
                found[part] = kill_within(runs, part, home, chance)
                print(objective, part, json.dumps(found[part]), flush=True)
            usual = {part: round(median(seconds), 4) for part, seconds in runs.seconds.items()}
    return {
        "seed": seed, "torch": version("torch"), "steps": STEPS,
        "load_average": round(os.getloadavg()[0], 1), "median_seconds_of_a_part": usual,
        "parts": found,
    }  # fmt: skip


if __name__ == "__main__":
    main()
