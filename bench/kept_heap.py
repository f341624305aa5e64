"""What glibc's heap holds under `allocator: keep_freed:True`, beside what is predicted of it.

The Llamas of bench/peers.py in other precisions, lengths and ways; each in a process of its own
with one thread, which makes four steps. *Held* is the most of its anonymous pages above those of
its imports; *heap*, *mapped* and *largest* are what `memfit.allocator.heap` says of the plan's
tape, and *live* is its most of live tensors: MiB. Writes bench/results/kept_heap.json, against
which `plan.memory.process.SCATTERED` is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peers

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "kept_heap.json"
MIB = 2**20
STEPS = 4
FULL, LORA = {"method": "full"}, {"method": "lora"}
MIXED = FULL | {"precision": "bf16-mixed"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("20M", how | {"precision": precision})
        for how in (FULL, LORA)
        for precision in peers.PRECISIONS
    ),
    ("20M", FULL | {"precision": "fp32", "loss": "plain"}),
    ("20M", MIXED | {"recompute": "full"}),
    ("20M", MIXED | {"attention": "math"}),
    ("20M", MIXED | {"micro_batch": 1}),
    ("20M", MIXED | {"micro_batch": 16, "length": 128}),
    ("58M", MIXED),
)


def plan(size: str, how: dict[str, Any]) -> Any:
    """The plan of a case, whose heap keeps what is freed."""
    from memfit import api
    from memfit.records import from_data
    from memfit.records.request import Request

    *_, rows, length = peers.SIZES[size]
    told = {"micro_batch": rows, "length": length, "loss": "chunked"} | how
    task = {"sequence_length": told.pop("length"), "global_batch": told["micro_batch"], "steps": 9}
    told |= {
        "model": peers.config_of(size), "task": task | {"packing": False}, "weights": "random",
        "lora": {"rank": peers.RANK, "targets": list(peers.TARGETS)}, "hardware": {"device": "cpu"},
        "allocator": "keep_freed:True", "limits": {"memory": "12 GiB"},
    }  # fmt: skip
    return api.plan(from_data(told, Request, source="the bench"))


def predict(made: Any) -> dict[str, float]:
    """What a plan's tape comes to, MiB."""
    from memfit.adapters import find_adapter
    from memfit.catalog import find_device
    from memfit.families import read_model
    from memfit.plan.memory.tape import hold_run

    recipe = made.recipe
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    held = hold_run(model, recipe, find_device("cpu"))
    return {"live": made.memory.peak_allocated / MIB} | {
        k: v / MIB for k, v in held._asdict().items()
    }


def measure() -> None:
    """What a case's process does: bytes above its imports, of the recipe on stdin."""
    import peft  # noqa: F401

    from memfit import api
    from memfit.core.system.memory import read_anonymous
    from memfit.records import from_data
    from memfit.records.recipe import Recipe
    from memfit.train.run import loop  # noqa: F401

    recipe = from_data(json.loads(sys.stdin.read()), Recipe, source="the bench")
    before = read_anonymous()
    assert before is not None
    found = api.measure(recipe, steps=STEPS).measurements["memory.device_total"].value
    print(found - before)


def main() -> None:
    from memfit.records import to_json

    rows = []
    for size, how in CASES:
        made = plan(size, how)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--worker"], input=to_json(made.recipe),
            stdout=subprocess.PIPE, text=True, check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        held = float(done.stdout.split()[-1]) / MIB
        figures = {name: round(mib, 1) for name, mib in (predict(made) | {"held": held}).items()}
        rows.append({"size": size, **how, **figures})
        print(json.dumps(rows[-1]), flush=True)
        OUT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    measure() if "--worker" in sys.argv else main()
