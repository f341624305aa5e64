"""What commands take as they are typed, beside `python -c pass` and `python -c "import torch"`.

All run in turns as whole processes, so that whatever else the machine does slows all of them; the
ratios are of medians, of wall time and of the CPU seconds of the process and its children.
`--no-cache` certifies anew; the command without it finds the certificate that its first run, which
is not counted, has left in a cache of this script's own. A plan is found in the same way; `anew` is
the same command with MEMFIT_NO_CACHE set, under which a certificate of a CPU measures what a run's
imports take, too. Writes bench/results/cold_start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import memfit

HERE = Path(__file__).resolve().parent
PASS, TORCH = "python -c pass", 'python -c "import torch"'
MEMFIT = ("-m", "memfit")
ANEW = ", anew"  # without the cache
PLAN = "plan llama-3.1-8b --device h100-sxm"
QUICK = {
    PASS: ["-c", "pass"],
    'python -c "import memfit"': ["-c", "import memfit"],
    "memfit --version": [*MEMFIT, "--version"],
    f"memfit {PLAN}{ANEW}": [*MEMFIT, *PLAN.split()],
    f"memfit {PLAN.replace('h100-sxm', 't4')}, which does not fit{ANEW}": [
        *MEMFIT, *PLAN.replace("h100-sxm", "t4").split(),
    ],
    f"memfit {PLAN}, from the cache": [*MEMFIT, *PLAN.split()],
    "memfit devices": [*MEMFIT, "devices"],
}  # fmt: skip
CERTIFIED = {
    TORCH: ["-c", "import torch"],
    f"memfit certify llama-3.1-8b{ANEW}": [*MEMFIT, "certify", "llama-3.1-8b"],
    "memfit certify llama-3.1-8b --no-cache": [*MEMFIT, "certify", "llama-3.1-8b", "--no-cache"],
    "memfit certify llama-3.1-8b --device h100-sxm --no-cache": [
        *MEMFIT, "certify", "llama-3.1-8b", "--device", "h100-sxm", "--no-cache",
    ],
    "memfit certify llama-3.1-8b, from the cache": [*MEMFIT, "certify", "llama-3.1-8b"],
}  # fmt: skip
# pip compiles a package when it installs it; a checkout is compiled by its first run, if it may be
ENVIRONMENT = {
    k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "MEMFIT_NO_CACHE")
}


def timed(name: str, arguments: list[str], cache: str) -> tuple[float, float]:
    """Seconds of wall time, and of CPU with all children."""
    anew = {"MEMFIT_NO_CACHE": "1"} if name.endswith(ANEW) else {}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], check=False, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**ENVIRONMENT, "MEMFIT_CACHE": cache, **anew},
    )  # fmt: skip
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):  # 3: the machine at hand is too small for it
        raise SystemExit(f"{arguments} ended with {done.returncode}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(commands: dict[str, list[str]], runs: int, cache: str) -> dict[str, dict[str, float]]:
    """Medians of each command, and its ratios to the first one."""
    for name, arguments in commands.items():
        timed(name, arguments, cache)  # byte code is compiled and files are cached
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, arguments in commands.items():
            taken[name].append(timed(name, arguments, cache))
    base = [median(times) for times in zip(*taken[next(iter(commands))], strict=True)]
    rows = {}
    for name, both in taken.items():
        wall, cpu = (median(times) for times in zip(*both, strict=True))
        rows[name] = {
            "wall_ms": round(1e3 * wall, 1), "cpu_ms": round(1e3 * cpu, 1),
            "wall_ratio": round(wall / base[0], 2), "cpu_ratio": round(cpu / base[1], 2),
        }  # fmt: skip
        print(f"{rows[name]['wall_ratio']:7.2f}x wall {rows[name]['cpu_ratio']:7.2f}x CPU  {name}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--certified", type=int, default=5, help="runs of what imports torch")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memfit-") as cache:
        quick = measure(QUICK, asked.runs, cache)
        certified = measure(CERTIFIED, asked.certified, cache)
    result = {
        "runs": asked.runs, "certified_runs": asked.certified, "memfit": memfit.__version__,
        "python": platform.python_version(), "torch": version("torch"),
        "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        f"beside {PASS}": quick, f"beside {TORCH}": certified,
    }  # fmt: skip
    if asked.write:
        target = HERE / "results" / "cold_start.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
