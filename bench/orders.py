"""How far the order of addresses moves what is reserved, and how often a plan's range covers it.

    python bench/orders.py [PLANS] [SEEDS]     35 plans, 8 seeds; writes bench/results/orders.json

Catalogue models drawn by a seed, full and LoRA in turn, on the smallest card that one of them is
said to fit (plan_vs_certificate.jsonl). Each plan's tape is replayed by the certifier's allocator
with shuffled addresses, none of which is an order of `allocator.orders`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plan_vs_certificate import read_rows

from memfit import api
from memfit.adapters import find_adapter
from memfit.allocator.caching import CachingAllocator, follow
from memfit.allocator.settings import Settings, read_settings
from memfit.allocator.tape import Line
from memfit.families import read_model
from memfit.plan.memory.tape import replay_other_orders, replay_run, write_tape
from memfit.plan.request.problem import read_problem
from memfit.plan.search.search import search

RESULTS = Path(__file__).resolve().parent / "results" / "orders.json"
SHARES = (0.001, 0.005, 0.01, 0.02)  # of the reserved bytes


class Shuffled(CachingAllocator):
    """Segments come at addresses drawn by a seed."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.draw = random.Random(seed)
        super().__init__(settings)

    def address_range(self, size: int, page: int) -> int:
        super().address_range(size, page)
        return self.draw.getrandbits(40) << 48


def reserve(events: Sequence[Line], settings: Settings, seed: int) -> int:
    allocator = Shuffled(settings, seed)
    for event in events:
        follow(allocator, event)
    return allocator.peak_reserved


def measure(row: dict[str, Any], seeds: int) -> dict[str, Any]:
    """One plan: bytes of the typical order, of those that make its range, and of shuffled ones."""
    told = {"method": row["method"]}
    request = api.read(row["model"], device=row["device"], changes=told)
    problem = read_problem(request)
    recipe = search(problem, levers=False).recipe
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    settings = read_settings(recipe.allocator, device_memory=problem.device.memory_driver or 0)
    events = write_tape(model, recipe, problem.device).events
    return {
        "model": row["model"], "method": row["method"], "device": row["device"],
        "reserved": replay_run(model, recipe, problem.device).reserved,
        "others": replay_other_orders(model, recipe, problem.device),
        "shuffled": [reserve(events, settings, seed) for seed in range(seeds)],
    }  # fmt: skip


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of shuffled replays above the typical bytes and above the range, by how much."""

    def above(row: dict[str, Any], *, ranged: bool) -> list[float]:
        top = max((row["reserved"], *(row["others"] if ranged else ())))
        return [nbytes / top - 1 for nbytes in row["shuffled"]]

    plain = [share for row in rows for share in above(row, ranged=False)]
    beyond = [share for row in rows for share in above(row, ranged=True)]
    highest = sorted(max(row["others"]) / row["reserved"] - 1 for row in rows)
    lowest = sorted(min(row["others"]) / row["reserved"] - 1 for row in rows)
    return {
        "plans": len(rows),
        "shuffled": len(plain),
        "unmoved": sum(len({row["reserved"], *row["shuffled"]}) == 1 for row in rows),
        "above_typical": {str(at): sum(x > at for x in plain) / len(plain) for at in SHARES},
        "above_range": {str(at): sum(x > at for x in beyond) / len(beyond) for at in SHARES},
        "most_above_typical": max(plain),
        "most_above_range": max(beyond),
        "range_up": statistics.quantiles(highest, n=20)[::6] + highest[-1:],
        "range_down": lowest[:1] + statistics.quantiles(lowest, n=20)[::6],
    }


def main() -> None:
    plans, seeds = (int(word) for word in (*sys.argv[1:], *("35", "8")[len(sys.argv) - 1 :]))
    known = [r for r in read_rows() if "certified" in r and r["count"] * r["nodes"] == 1]
    rows = []
    for row in random.Random(0).sample(known, min(plans, len(known))):
        rows.append(measure(row, seeds))
        print(json.dumps(rows[-1]), flush=True)
    made = {**summarise(rows), "rows": rows}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
