"""Runs that sample answers, killed ten times within each part of an iteration: the bits at the end.

    python bench/rollout_kills.py [SEED]      writes bench/results/rollout_kills.json, prints it

A tiny Llama with an adapter learns by GRPO on this CPU: groups of four answers in two waves of
slots, a KL divergence, two updates with each rollout, a checkpoint every second iteration. For each
part (rollout, reward, score, update, save) a run is killed by SIGKILL at random moments within that
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests")]

from rollout_kills import PARTS, Runs, start_runs  # noqa: E402
from test_online_run import weights_of, without_times  # noqa: E402
from tiny_rollouts import write_data  # noqa: E402

from memfit.records import write_atomically  # noqa: E402
from memfit.train.run.logs import read_log  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "rollout_kills.json"
KILLS = 10


def kill_within(runs: Runs, part: str, home: Path, chance: random.Random) -> dict[str, Any]:
    """Ten kills within a part, and the end of the run."""
    folder, inside, missed = home / part, 0, 0
    logged = []
    while inside < KILLS:
        hit = runs.kill(folder, part, chance)
        inside, missed = inside + hit, missed + (not hit)
        if hit:
            logged.append(len(read_log(folder)))
    runs.whole(folder)
    whole = home / "whole"
    logs = [without_times(read_log(place)) for place in (folder, whole)]
    return {
        "kills": inside, "kills_after_the_part": missed, "steps_logged": logged,
        "weights_bit_equal": weights_of(folder) == weights_of(whole),
        "log_equal": logs[0] == logs[1], "steps": len(logs[0]),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with start_runs(write_data(home / "data"), home / "cache") as runs:
            runs.whole(home / "whole")
            found = {part: kill_within(runs, part, home, chance) for part in PARTS}
            longest = {part: round(seconds, 4) for part, seconds in runs.seconds.items()}
    answer = {
        "seed": seed, "torch": version("torch"), "load_average": round(os.getloadavg()[0], 1),
        "longest_seconds_of_a_part": longest, "parts": found,
    }  # fmt: skip
    write_atomically(RESULTS, (json.dumps(answer, indent=1) + "\n").encode())
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
