"""Every catalogue model, whole and with LoRA, on the smallest offer that its plan says fits.

    python bench/plan_vs_certificate.py [MODEL ...]   one row each, resumed; writes the .jsonl
    python bench/plan_vs_certificate.py --summary     what the rows say; writes the .json beside it

The claims: no plan that says `fits` has a certificate that exceeds the usable memory, and what a
plan says is reserved is within 1 % of its certificate's in the median, 3 % at worst. A model that
no offer fits, or that is not planned or traced, is a row that says why.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit import api, certify
from memfit.core.errors import Error
from memfit.plan.request.problem import find_device, read_problem
from memfit.plan.search.search import search
from memfit.records.results import Plan

RESULTS = Path(__file__).resolve().parent / "results" / "plan_vs_certificate.jsonl"
METHODS = ("full", "lora")
# device, cards of a machine, machines: by the memory of all together
OFFERS = (
    ("rtx-4060", 1, 1), ("rtx-3060-12", 1, 1), ("rtx-4080", 1, 1), ("rtx-4090", 1, 1),
    ("rtx-5090", 1, 1), ("a100-sxm-40", 1, 1), ("l40s", 1, 1), ("h100-sxm", 1, 1),
    ("h200-sxm", 1, 1), ("h100-sxm", 2, 1), ("b200-sxm", 1, 1), ("h100-sxm", 4, 1),
    ("h100-sxm", 8, 1), ("h200-sxm", 8, 1), ("h100-sxm", 8, 2), ("h100-sxm", 8, 4),
    ("h100-sxm", 8, 8), ("h100-sxm", 8, 16), ("h100-sxm", 8, 64),
)  # fmt: skip


def find_smallest(model: str, method: str) -> Plan | None:
    """The plan on the first offer that it says fits."""
    for device, count, nodes in OFFERS:
        changes: dict[str, Any] = {"method": method}
        if count * nodes > 1:
            # a rank has a row at least
            changes |= {"hardware.count": count, "hardware.nodes": nodes}
            changes |= {"task.global_batch": max(16, count * nodes)}
        problem = read_problem(api.read(model, device=device, changes=changes))
        weights = 2 * problem.model.parameters
        if weights > (problem.usable or 0) * count * nodes:
            continue
        plan = search(problem, levers=False)
        if plan.memory.verdict == "fits":
            return plan
    return None


def compare(model: str, method: str) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"model": model, "method": method}
    started = time.perf_counter()
    try:
        plan = find_smallest(model, method)
        if plan is None:
            return row | {"lack": "no offer fits"}
        made, hardware = plan.memory, plan.request.hardware
        row |= {
            "device": hardware.device, "count": hardware.count, "nodes": hardware.nodes,
            "recipe": plan.label, "usable": made.usable,
            "predicted": _figures(made), "plan_seconds": round(time.perf_counter() - started, 2),
        }  # fmt: skip
        started = time.perf_counter()
        proof = certify.certify(plan.recipe, find_device(hardware.device), made.usable)
    except Error as error:
        return row | {"lack": error.message}
    row |= {
        "certified": _figures(proof.memory), "verdict": proof.memory.verdict,
        "certify_seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip
    return row


def _figures(memory: Any) -> dict[str, int]:
    names = ("peak_allocated", "peak_reserved", "total_low", "device_total", "total_high")
    return {name: getattr(memory, name) for name in names}


def read_rows() -> list[dict[str, Any]]:
    """The rows so far."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The claims' figures."""
    made = [row for row in rows if "certified" in row]

    def off(row: dict[str, Any], name: str) -> float:
        return float(row["predicted"][name] / row["certified"][name] - 1)

    def sizes(name: str) -> list[float]:
        return sorted(abs(off(row, name)) for row in made)

    reserved, allocated = sizes("peak_reserved"), sizes("peak_allocated")
    worst = sorted(made, key=lambda row: -abs(off(row, "peak_reserved")))[:5]
    over = [r for r in made if r["certified"]["device_total"] > r["usable"]]
    return {
        "rows": len(rows),
        "certified": len(made),
        "exceed_usable": [f"{r['model']} {r['method']}" for r in over],
        "verdicts": {v: sum(r["verdict"] == v for r in made) for v in {r["verdict"] for r in made}},
        "reserved_median": statistics.median(reserved),
        "reserved_worst": reserved[-1],
        "allocated_median": statistics.median(allocated),
        "allocated_worst": allocated[-1],
        "furthest": {f"{r['model']} {r['method']}": off(r, "peak_reserved") for r in worst},
        "lacking": {f"{r['model']} {r['method']}": r["lack"] for r in rows if "lack" in r},
    }


def _open(asked: list[str]) -> Iterator[tuple[str, str]]:
    known = {(row["model"], row["method"]) for row in read_rows()}
    for model in sorted(api.models(), key=lambda m: m.parameters):
        for method in METHODS:
            if (model.id, method) not in known and (not asked or model.id in asked):
                yield model.id, method


def main() -> None:
    if "--summary" not in sys.argv:
        for model, method in _open(sys.argv[1:]):
            row = compare(model, method)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            made = row.get("certified")
            off = row["predicted"]["peak_reserved"] / made["peak_reserved"] - 1 if made else 0
            print(model, method, row.get("device"), row.get("count"), row.get("verdict"),
                  f"{off:+.3%}" if made else row["lack"], flush=True)  # fmt: skip
    found = summarise(read_rows())
    RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
