"""Which tests a mutant is put to: those that reach its block first, then those of near files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping

from mutants import ROOT

REACHED, TIMES = ROOT / "build" / "reached", ROOT / "build" / "suite_times"
Block = tuple[str, int]
UNCOUNTED = 1.0  # CPU seconds that a test is taken to have where nobody counted them


def find_costs() -> dict[str, float]:
    """CPU seconds of tests, as far as they were counted."""
    costs: dict[str, float] = defaultdict(lambda: UNCOUNTED)
    for file in sorted(TIMES.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == "test":
                costs[row["test"]] = costs.get(row["test"], 0.0) + row["cpu"]
    return costs


def find_reaching(wanted: set[Block]) -> dict[Block, list[str]]:
    """The tests that reach each block, as far as they were mapped."""
    found: dict[Block, list[str]] = defaultdict(list)
    for file in sorted(REACHED.glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                for name, blocks in row["reached"].items():
                    for block in blocks:
                        if (name, block) in wanted:
                            found[name, block].append(row["test"])
    return found


def choose(
    tests: list[str], costs: Mapping[str, float], seconds: float, near: list[str]
) -> list[str]:
    """Of each file the cheapest tests in turn, the files that are near first."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(set(tests), key=lambda test: (costs[test], test)):
        by_file[test.partition("::")[0]].append(test)
    places = {file: at for at, file in enumerate(near)}

    def distance(file: str) -> tuple[int, float]:
        mean = sum(costs[test] for test in by_file[file]) / len(by_file[file])
        return places.get(file, len(near)), mean

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
