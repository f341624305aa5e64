"""A ladder of techniques, one rung on the other: predicted, certified and measured bytes.

    python bench/ladder.py [--only SCALE ...] [--no-measure] [--no-write]

Each rung keeps what the rungs below it set. `small` is measured on this machine's CPU, where the
counter is exact bytes of live tensors; the others are predicted and certified for an H100. `small`
computes in fp32: a CPU without bf16 products takes a hundred times as long for them. A rung that
does not exist on a CPU says why there. Errors are of the peak allocated: predicted against
certified, certified against measured. Writes bench/results/ladder.json, of which
scripts/ladder_page.py makes docs/ladder.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit import api
from memfit.core.errors import Error
from memfit.records import from_data
from memfit.records.request import Request
from memfit.records.results import Plan

OUT = Path(__file__).resolve().parent / "results" / "ladder.json"
SMALL = {
    "name": "small-llama", "model_type": "llama", "vocab_size": 4096, "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCALES: dict[str, dict[str, Any]] = {
    "small": {
        "model": SMALL, "hardware": {"device": "cpu"}, "micro_batch": 4, "precision": "fp32",
        "task": {"sequence_length": 256, "global_batch": 4, "steps": 10},
    },
    "llama-3.2-3b": {
        "model": "llama-3.2-3b", "hardware": {"device": "h100-sxm"}, "micro_batch": 2,
        "precision": "bf16-mixed",
        "task": {"sequence_length": 4096, "global_batch": 2, "steps": 10},
    },
    "llama-3.1-8b": {
        "model": "llama-3.1-8b", "hardware": {"device": "h100-sxm"}, "micro_batch": 2,
        "precision": "bf16-mixed",
        "task": {"sequence_length": 4096, "global_batch": 2, "steps": 10},
    },
}  # fmt: skip
BASE = {
    "weights": "random", "method": "full", "loss": "plain",
    "recompute": "none", "task.packing": False, "lean": "none",
    "optimizer.name": "adamw", "optimizer.implementation": "fused", "optimizer.clip_norm": 0.0,
}  # fmt: skip
RUNGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("base: padded rows, AdamW, plain loss", {}),
    ("packing", {"task.packing": True}),
    ("loss in chunks", {"loss": "chunked", "loss_chunk": 256}),
    ("lean blocks", {"lean": "all"}),
    ("recompute of all blocks", {"recompute": "full"}),
    ("weights updated in backward", {"optimizer.in_backward": True}),
    ("activations on the host, none made again", {"offload": "activations", "recompute": "none"}),
    ("8-bit states", {"optimizer.name": "adamw8bit", "optimizer.implementation": "auto"}),
    ("LoRA", {"method": "lora", "lora.rank": 16}),
    ("QLoRA", {"base_format": "nf4"}),
)


def climb(scale: str, measured: bool) -> list[dict[str, Any]]:
    """Every rung of a scale, from the lowest."""
    rows = []
    for name, changes, plan in list_rungs(scale):
        row: dict[str, Any] = {"rung": name, "sets": changes}
        if isinstance(plan, str):
            row["refused"] = plan
        else:
            row |= weigh(plan, measured=measured and scale == "small")
        rows.append(row)
        print(scale, json.dumps(row), flush=True)
    return rows


def list_rungs(scale: str) -> Iterator[tuple[str, dict[str, Any], Plan | str]]:
    """Each rung's name, what it sets, and its prediction; or why there is none."""
    base = from_data(SCALES[scale], Request, source="the ladder")
    told = dict(BASE)
    for name, changes in RUNGS:
        if "offload" in changes and base.hardware.device == "cpu":
            yield name, changes, "a CPU's memory is the host's"
            continue
        try:
            plan = api.predict(api.change(base, told | changes))
        except Error as error:  # the rungs above stand on those below that exist
            yield name, changes, error.message
            continue
        told |= changes
        yield name, changes, plan


def weigh(plan: Plan, *, measured: bool) -> dict[str, Any]:
    """Certified, and where asked measured."""
    proof = api.certify(plan.recipe, usable=plan.memory.usable)
    predicted, certified = plan.memory.peak_allocated, proof.memory.peak_allocated
    row: dict[str, Any] = {
        "predicted": predicted, "certified": certified,
        "predicted_off": round(predicted / certified - 1, 6),
        "step_seconds": plan.time.step_seconds, "peak_phase": str(proof.memory.peak_phase),
        "at_peak": {str(k): n for k, n in proof.ledger.by_kind(proof.memory.peak_phase).items()},
        "reserved": proof.memory.peak_reserved, "verdict": proof.memory.verdict,
    }  # fmt: skip
    if measured:
        found = api.measure(plan.recipe, steps=2)
        row["measured"] = max(found.phases.values())
        row["certified_off"] = round(certified / row["measured"] - 1, 6)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    found = {scale: climb(scale, asked.measure) for scale in asked.only}
    if asked.write:
        kept = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
        every = {scale: (kept | found).get(scale) for scale in SCALES}
        whole = {scale: rows for scale, rows in every.items() if rows}
        OUT.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
