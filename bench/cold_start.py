"""How long `memfit plan llama-3.1-8b --device h100-sxm` takes, as a ratio to `python -c pass`.

Both run in turns as whole processes, so that whatever else the machine does slows both; the ratio
is of the medians. Writes bench/results/cold_start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import memfit

HERE = Path(__file__).resolve().parent
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "memfit --version": ["-m", "memfit", "--version"],
    "memfit plan llama-3.1-8b --device h100-sxm": [
        "-m", "memfit", "plan", "llama-3.1-8b", "--device", "h100-sxm",
    ],
    "memfit devices": ["-m", "memfit", "devices"],
}  # fmt: skip


# pip compiles a package when it installs it; a checkout is compiled by its first run, if it may be
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def timed(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():
        timed(arguments)  # byte code is compiled and files are cached
    for _ in range(asked.runs):
        for name, arguments in COMMANDS.items():
            seconds[name].append(timed(arguments))
    base = median(seconds["python -c pass"])
    rows = {
        name: {
            "median_ms": round(1e3 * median(times), 1),
            "least_ms": round(1e3 * min(times), 1),
            "ratio": round(median(times) / base, 1),
        }
        for name, times in seconds.items()
    }
    for name, row in rows.items():
        print(f"{row['ratio']:6.1f}x  {row['median_ms']:8.1f} ms  {name}")
    result = {
        "runs": asked.runs, "memfit": memfit.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "commands": rows,
    }  # fmt: skip
    if asked.write:
        target = HERE / "results" / "cold_start.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
