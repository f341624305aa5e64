"""The rest of bench/gpu_grid.py: every family, method and knob, the quick ones first."""

from __future__ import annotations

from functools import cache
from typing import Any

import gpu_grid

from on_gpu.rows import Place, Row, Unit

TWINS = 1
SECONDS = 200.0


@cache
def _plans(row: str, quick: bool) -> dict[str, Any]:
    """Name and plan of each recipe that fits the device as predicted."""
    from memfit import api

    device = api.find_device(row)
    plans = (api.predict(request) for request in gpu_grid.make_requests(device, quick=quick))
    return {gpu_grid.describe(plan): plan for plan in plans}


def list_units(place: Place) -> list[Unit]:
    names = list(_plans("cpu" if place.rehearsal else place.row, place.rehearsal))
    if place.rehearsal:
        return [Unit(name, SECONDS) for name in names[:TWINS]]
    turned = [name for start in range(7) for name in names[start::7]]  # all knobs early
    return [Unit(name, SECONDS + 60) for name in turned]


def measure(name: str, place: Place) -> Row:
    """Predicted, certified and measured, by the grid's own code."""
    from memfit import api

    row_name = "cpu" if place.rehearsal else place.row
    plan = _plans(row_name, place.rehearsal)[name]
    corpus = place.out / ("corpus-rehearsal.jsonl" if place.rehearsal else "corpus.jsonl")
    row = gpu_grid.run_case(plan, api.find_device(row_name), corpus, SECONDS)
    return {k: v for k, v in row.items() if k not in ("name", "device", "environment", "seconds")}
