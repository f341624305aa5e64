"""Which tests a mutant is put to: those that reach its block, cheap ones of many files first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from mutants import ROOT, Mutant

REACHED, TIMES = ROOT / "build" / "reached", ROOT / "build" / "suite_times"
CHOSEN = ROOT / "build" / "chosen_tests.txt"  # what was collected; without it, it is again
Block = tuple[str, int]


def find_costs(tree: Path) -> dict[str, float]:
    """CPU seconds of the tests that `make test` runs today, as far as they were counted."""
    costs: dict[str, float] = defaultdict(float)
    for file in sorted(TIMES.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == "test":
                costs[row["test"]] += row["cpu"]
    if not CHOSEN.exists():
        listed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not wide",
             "-p", "no:randomly"], cwd=tree, capture_output=True, text=True,
        ).stdout.splitlines()  # fmt: skip
        CHOSEN.write_text("\n".join(line for line in listed if "::" in line), encoding="utf-8")
    chosen = set(CHOSEN.read_text(encoding="utf-8").splitlines())
    return {test: cost for test, cost in costs.items() if test in chosen}


def find_reaching(wanted: set[Block], costs: Mapping[str, float]) -> dict[Block, list[str]]:
    """The tests that reach each block in their own process."""
    found: dict[Block, list[str]] = defaultdict(list)
    for file in sorted(REACHED.glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row["test"] not in costs:
                    continue
                for name, blocks in row["reached"].items():
                    for block in blocks:
                        if (name, block) in wanted:
                            found[name, block].append(row["test"])
    return found


def find_speaking(mutant: Mutant, costs: Mapping[str, float]) -> list[str]:
    """For what stands outside functions, what processes of their own alone reach, and where
    nothing was mapped: the tests of its package in files that name its module or its folder."""
    path = Path(mutant.file)
    names = "|".join({path.stem, path.parent.name} - {"__init__"})
    files = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests" / path.parts[2]).rglob("test_*.py")
        if re.search(rf"\b({names})\b", file.read_text(encoding="utf-8"))
    }
    return [test for test in costs if test.partition("::")[0] in files]


def choose(
    mutant: Mutant, tests: list[str], costs: Mapping[str, float], seconds: float
) -> list[str]:
    """Of each file the cheapest tests in turn, those files first that mirror the module."""
    package, module = Path(mutant.file).parts[2], Path(mutant.file).stem
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(set(tests), key=lambda test: (costs[test], test)):
        by_file[test.partition("::")[0]].append(test)

    def distance(file: str) -> tuple[bool, bool, bool, float]:
        path = Path(file)
        mean = sum(costs[test] for test in by_file[file]) / len(by_file[file])
        return path.stem != f"test_{module}", path.parts[1] != package, mean > 1, mean

    queues = [by_file[file] for file in sorted(by_file, key=distance)]
    chosen, left = [], seconds
    while queues and left > 0:
        for queue in queues:
            test = queue.pop(0)
            if not chosen or costs[test] <= left:
                chosen.append(test)
                left -= costs[test] + 0.02  # of pytest itself
        queues = [queue for queue in queues if queue]
    return chosen
