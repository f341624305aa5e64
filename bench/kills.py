"""Ranks killed at random moments, and what was lost: ten times one, ten times all of them.

    python bench/kills.py [SEED]      writes bench/results/kills.json and prints it

Two processes train a tiny model through gloo and save every second step, asynchronously. One of
them is killed within two seconds after its first step, ten times in a row, each time after the same
command went on; then, in another run, both of them while the next checkpoint after such a moment
is being written. The claims: the others end within 60 s, every checkpoint that is there is whole,
no more is lost than the steps since the newest one, and the run that was killed ten times ends with
the losses of one that was not, bit by bit.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests")]

from test_many_ranks import SHARDS, kill, start_runs  # noqa: E402

from memfit.records import write_atomically  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "kills.json"
KILLS, STEPS = 10, 400
ORDER = {"parallel": SHARDS, "steps": STEPS, "asynchronous": True}


def killed(runs: Any, name: str, chance: Any, *, everyone: bool) -> dict[str, Any]:
    """A run that is killed ten times and then goes on to its end."""
    found = [kill(runs, name, chance, within=2.0, everyone=everyone, **ORDER) for _ in range(KILLS)]
    run = runs.whole(name, **ORDER)
    return {
        "kills": len(found),
        "seconds_until_all_ended": [round(seconds, 2) for seconds, _, _ in found],
        "steps_logged": [logged for _, logged, _ in found],
        "newest_checkpoint": [newest for _, _, newest in found],
        "most_steps_lost": max(logged - newest for _, logged, newest in found),
        "losses": run.losses,
    }


def main() -> None:
    """See the module."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    chance = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder, start_runs(Path(folder)) as runs:
        whole = runs.whole("whole", **ORDER)
        found = {
            "one rank": killed(runs, "one", chance, everyone=False),
            "all while saving": killed(runs, "all", chance, everyone=True),
        }
    for row in found.values():
        row["losses_bit_equal"] = row.pop("losses") == whole.losses
    answer = {
        "seed": seed, "ranks": 2, "steps": STEPS, "save_every": 2, "torch": version("torch"),
        "load_average": round(os.getloadavg()[0], 1), **found,
    }  # fmt: skip
    write_atomically(RESULTS, (json.dumps(answer, indent=1) + "\n").encode())
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
