"""The corpus of measured runs: one JSON line a row, under measurements/."""

from __future__ import annotations

import json
from pathlib import Path

from memfit.nouns import to_data, write_atomically
from memfit.results import Plan, Run


def append_row(path: Path, plan: Plan, run: Run) -> None:
    """Add a measured run: recipe, counters, what was predicted, environment. Atomic."""
    row = {
        "schema": 1,
        "source": "memfit measure",
        "recipe_digest": run.recipe_digest,
        "recipe": to_data(run.recipe),
        "measurements": to_data(run.measurements),
        "phases": run.phases,
        "predicted_phases": {str(p): plan.ledger.total(p) for p in plan.ledger.phases},
        "environment": run.environment,
    }
    line = json.dumps(row, sort_keys=True) + "\n"
    old = path.read_bytes() if path.exists() else b""
    write_atomically(path, old + line.encode())
