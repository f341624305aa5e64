"""Certified against measured peaks of live tensor bytes, on this CPU, phase by phase.

    python bench/exactness.py        writes bench/results/exactness_cpu.jsonl and prints a table

Each row is one tiny recipe: its step traced on fake tensors and run for real, the same documents
in both. `difference` is certified minus measured, bytes, by phase; 0 everywhere is the claim.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "certify"))

import torch  # noqa: E402
import transformers  # noqa: E402
from tiny_steps import CPU, FAMILIES, make_recipe, possible, watch_real_step  # noqa: E402

from memfit.certify import trace  # noqa: E402
from memfit.certify.tracing.trace_step import worst_shapes  # noqa: E402
from memfit.records import write_atomically  # noqa: E402
from memfit.records.ledger import Phase  # noqa: E402
from memfit.records.recipe import Freeze  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "exactness_cpu.jsonl"
BF16 = {"precision": "bf16", "base_format": "bf16"}
MIXED = {"precision": "bf16-mixed"}
GRID: dict[str, dict[str, Any]] = {
    "full fp32": {},
    "full bf16": BF16,
    "full bf16-mixed": MIXED,
    "full fp32 foreach, 4 micro-batches": {"implementation": "foreach", "accumulation": 4},
    "full bf16 recompute all, packed": {**BF16, "recompute_blocks": 3, "packing": True},
    "full bf16-mixed recompute one": {**MIXED, "recompute_blocks": 1},
    "full fp32 chunked loss": {"loss": "chunked", "loss_chunk": 20},
    "full fp32 math attention": {"attention": "math"},
    "adamw8bit fp32": {"name": "adamw8bit", "implementation": "loop"},
    "adamw8bit bf16-mixed, recompute all": {
        **MIXED, "name": "adamw8bit", "implementation": "loop", "recompute_blocks": 3,
    },
    "adamw4bit bf16": {**BF16, "name": "adamw4bit", "implementation": "loop"},
    "adamwfp8 fp32": {"name": "adamwfp8", "implementation": "loop"},
    "full fp16-mixed": {"precision": "fp16-mixed"},
    "full fp16-mixed foreach, chunked loss": {
        "precision": "fp16-mixed", "implementation": "foreach", "loss": "chunked",
        "loss_chunk": 20,
    },
    "lora fp16 base": {"method": "lora", "precision": "fp16-mixed", "base_format": "fp16"},
    "sgd fp32": {"name": "sgd", "implementation": "foreach"},
    "freeze fp32": {"method": "freeze", "freeze": Freeze(last_blocks=1)},
    "lora fp32": {"method": "lora"},
    "lora bf16 base, recompute all": {
        "method": "lora", **MIXED, "base_format": "bf16", "recompute_blocks": 3,
    },
}  # fmt: skip


def compare(family: str, name: str) -> dict[str, Any]:
    recipe = make_recipe(family, **GRID[name])
    fake = trace(recipe, CPU)
    shapes = worst_shapes(recipe)[:1] * recipe.accumulation
    real = watch_real_step(recipe, shapes)
    measured = {str(p): n for p, n in real.peaks.items() if p is not Phase.LOAD}
    certified = {str(p): n for p, n in fake.phases.items() if str(p) in measured}
    return {
        "family": family,
        "variant": name,
        "recipe_digest": recipe.digest,
        "certified_peak": fake.peak,
        "measured_peak": real.peak,
        "difference": {p: certified[p] - n for p, n in measured.items()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows = [
        compare(family, name)
        for family in FAMILIES
        for name in GRID
        if possible(family, GRID[name])
    ]
    write_atomically(RESULTS, "".join(json.dumps(row) + "\n" for row in rows).encode())
    print(f"{'variant':40}{'recipes':>8}{'largest difference in any phase':>34}")
    for name in GRID:
        mine = [abs(n) for r in rows if r["variant"] == name for n in r["difference"].values()]
        count = sum(r["variant"] == name for r in rows)
        print(f"{name:40}{count:8}{max(mine):32} B")
    worst = max(abs(n) for row in rows for n in row["difference"].values())
    seconds = time.perf_counter() - started
    print(f"{len(rows)} recipes, largest difference {worst} B, {seconds:.0f} s")


if __name__ == "__main__":
    main()
