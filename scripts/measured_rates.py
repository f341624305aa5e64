"""src/memfit/catalog/measured_rates.json: the curves that `make gpu` measured of whole cards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gpu_claims

SOURCE = "docs/gpu.md"


def write(rows: Sequence[dict[str, Any]] | None = None) -> str:
    """The file's text, from the rows of the slice `rates`; an imitated card has none."""
    found: dict[str, dict[str, Any]] = {}
    for row in gpu_claims.read() if rows is None else rows:
        if row["slice"] != "rates":
            continue
        where = f"{SOURCE}, torch {row['environment']['torch']}"
        one = found.setdefault(row["device"], {"source": where, "curves": []})
        for curve in row.get("curves", ()):
            told = ("work", "dtype", "kernel", "spread", "points")
            one["curves"].append({key: curve[key] for key in told if curve.get(key)})
        if row.get("launch_seconds"):
            one["launch_seconds"] = row["launch_seconds"]
    return json.dumps(found, sort_keys=True) + "\n"
