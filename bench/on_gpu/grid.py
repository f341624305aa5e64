"""The rest of bench/gpu_grid.py: every family, method and knob, a seventh of each in turn."""

from __future__ import annotations

import gpu_grid

from on_gpu.rows import Place, Row, Unit

TWINS = 1
SECONDS = 200.0


def list_units(place: Place) -> list[Unit]:
    if place.rehearsal:
        return [Unit(f"case {n}", SECONDS) for n in range(TWINS)]
    turned = [n for start in range(7) for n in range(start, gpu_grid.CASES, 7)]  # all knobs early
    return [Unit(f"case {n}", SECONDS + 60) for n in turned]


def measure(name: str, place: Place) -> Row:
    """Predicted, certified and measured, by the grid's own code."""
    from memfit import api

    device = api.find_device("cpu" if place.rehearsal else place.row)
    number = int(name.removeprefix("case "))
    request = gpu_grid.make_request(number, device, quick=place.rehearsal)
    if request is None:
        return {"left_out": "no length of it fits this device as predicted"}
    plan = api.predict(request)
    corpus = place.out / ("corpus-rehearsal.jsonl" if place.rehearsal else "corpus.jsonl")
    row = gpu_grid.run_case(plan, device, corpus, SECONDS)
    row["recipe"] = row.pop("name")
    return {k: v for k, v in row.items() if k not in ("device", "environment", "seconds")}
