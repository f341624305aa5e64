"""How long a certificate of one rank takes, by model and world, as `memfit certify` is typed.

    python bench/ranks.py        writes bench/results/ranks.json and prints a table

Each row is a whole command with its imports: wall and CPU seconds of it and of the process that
it starts, and the largest resident set of the two. The claims: Llama-3.1-70B on 512 ranks within
40 s and 1.5 GB on 2 cores, and a cost that does not grow with the number of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memfit.records import write_atomically

RESULTS = Path(__file__).resolve().parent / "results" / "ranks.json"
CASES = (  # model, nodes of 8 devices, copies
    ("llama-3.1-8b", 8, 1),
    ("llama-3.1-8b", 64, 1),
    ("llama-3.1-8b", 512, 1),
    ("llama-3.1-8b", 64, 64),
    ("llama-3.1-70b", 64, 1),
)


def measure(model: str, nodes: int, copies: int) -> dict[str, Any]:
    ranks = 8 * nodes
    stated = {
        "hardware.device": "h100-sxm", "hardware.count": 8, "hardware.nodes": nodes,
        "parallel.dp_replicate": copies, "parallel.dp_shard": ranks // copies,
        "task.global_batch": ranks, "precision": "bf16-mixed", "recompute": "full",
    }  # fmt: skip
    row = certify(model, stated)
    return {"model": model, "dp_replicate": copies, "dp_shard": ranks // copies, **row}


def certify(model: str, stated: dict[str, Any]) -> dict[str, Any]:
    """`memfit certify MODEL --set …` as a process: what it took, and what it says."""
    options = [
        word
        for key, value in stated.items()
        for word in ("--set", f"{key}={json.dumps(value) if isinstance(value, bool) else value}")
    ]
    command = [sys.executable, "-m", "memfit", "certify", model, *options, "--json", "--quiet"]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    made = json.loads(text)
    return {
        "recipe_digest": made["recipe_digest"],
        "wall_seconds": round(wall, 1),
        "load_average": round(os.getloadavg()[0], 1),  # of the last minute: others' work included
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "largest_rss_mb": round(used.ru_maxrss / 1024),  # Linux counts in KiB
        "peak_allocated": made["memory"]["peak_allocated"],
        "peak_reserved": made["memory"]["peak_reserved"],
        "verdict": made["memory"]["verdict"],
        "bounds": made["bounds"],
    }


def main() -> None:
    rows = []
    for case in CASES:
        row = measure(*case)
        rows.append(row)
        mesh = f"{row['dp_replicate']} x {row['dp_shard']}"
        print(
            f"{row['model']:14} {mesh:>9} ranks  {row['wall_seconds']:5.1f} s wall"
            f"  {row['cpu_seconds']:5.1f} s CPU  {row['largest_rss_mb']:5} MB"
            f"  {row['peak_allocated'] / 2**30:6.2f} GiB allocated"
            f"  {row['peak_reserved'] / 2**30:6.2f} GiB reserved",
            flush=True,
        )
    record(rows, RESULTS)


def record(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows of `certify` beside what they were measured with."""
    found = {
        "counter": "perf_counter and rusage of the whole command with its imports; Linux",
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "rows": rows,
    }
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
