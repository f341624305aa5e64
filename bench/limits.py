"""One model under four memory limits: the recipe each one gets, and what its steps really hold.

The demo's model at a global batch of 64 sequences, so that the limits bind. For each limit the
plan's recipe runs two real steps with every live tensor counted. Writes
bench/results/limits_cpu.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path

from memfit import api
from memfit.units import parse_bytes, show_bytes

HERE = Path(__file__).resolve().parent
LIMITS = ("0.25 GiB", "0.5 GiB", "1 GiB", "2 GiB")
STEPS = 2


def ask(limit: str) -> api.Request:
    return api.read(
        HERE.parent / "recipes" / "demo-llama_full_cpu.yaml",
        changes={
            "limits.memory": limit,
            "task.global_batch": 64,
            "task.data": "",
            "task.evaluation": "",
        },
    )


def main() -> None:
    rows = []
    for limit in LIMITS:
        plan = api.plan(ask(limit))
        run = api.measure(plan.recipe, steps=STEPS)
        measured = max(run.phases.values())
        rows.append(
            {
                "limit": parse_bytes(limit), "recipe": plan.recipe_digest,
                "chosen": plan.considered[0].label, "predicted": plan.memory.peak_allocated,
                "measured": measured,
                "step_seconds": run.measurements["time.step_seconds"].value,
            }
        )  # fmt: skip
        print(
            f"{limit:>8}  predicted {show_bytes(plan.memory.peak_allocated):>11}  measured "
            f"{show_bytes(measured):>11}  {plan.considered[0].label}",
            flush=True,
        )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (HERE / "results" / "limits_cpu.jsonl").write_text(text)
    assert all(row["measured"] <= row["limit"] for row in rows)
    assert len({row["recipe"] for row in rows}) == len(LIMITS)


if __name__ == "__main__":
    main()
