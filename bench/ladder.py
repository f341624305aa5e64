"""A ladder of techniques, one rung on the other: predicted, certified and measured bytes.

    python bench/ladder.py [--only SCALE ...] [--no-measure] [--no-write]

Each rung keeps what the rungs below it set. `small` is measured on this machine's CPU, where the
counter is exact bytes of live tensors; the others are predicted and certified for an H100. Seconds
of a step are the prediction's, per useful token where rows were padded before packing. A rung that
does not exist on a CPU says why there. Errors are of the peak allocated: predicted against
certified, certified against measured. Writes bench/results/ladder.json and ladder.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from memfit import api
from memfit.errors import Error
from memfit.nouns import from_data
from memfit.request import Request
from memfit.units import show_bytes, show_seconds

OUT = Path(__file__).resolve().parent / "results" / "ladder.json"
SMALL = {
    "name": "small-llama", "model_type": "llama", "vocab_size": 16384, "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCALES: dict[str, dict[str, Any]] = {
    "small": {
        "model": SMALL, "hardware": {"device": "cpu"}, "micro_batch": 4,
        "task": {"sequence_length": 512, "global_batch": 4, "steps": 10},
    },
    "llama-3.2-3b": {
        "model": "llama-3.2-3b", "hardware": {"device": "h100-sxm"}, "micro_batch": 2,
        "task": {"sequence_length": 4096, "global_batch": 2, "steps": 10},
    },
    "llama-3.1-8b": {
        "model": "llama-3.1-8b", "hardware": {"device": "h100-sxm"}, "micro_batch": 2,
        "task": {"sequence_length": 4096, "global_batch": 2, "steps": 10},
    },
}  # fmt: skip
BASE = {
    "weights": "random", "method": "full", "precision": "bf16-mixed", "loss": "plain",
    "recompute": "none", "task.packing": False, "lean": "none",
    "optimizer.name": "adamw", "optimizer.implementation": "foreach", "optimizer.clip_norm": 0.0,
}  # fmt: skip
RUNGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("base: padded rows, AdamW, plain loss", {}),
    ("packing", {"task.packing": True}),
    ("loss in chunks", {"loss": "chunked", "loss_chunk": 256}),
    ("lean blocks", {"lean": "all"}),
    ("recompute of all blocks", {"recompute": "full"}),
    ("weights updated in backward", {"optimizer.in_backward": True}),
    ("activations on the host", {"offload": "activations"}),
    ("8-bit states", {"optimizer.name": "adamw8bit", "optimizer.implementation": "auto"}),
    ("LoRA", {"method": "lora", "lora.rank": 16, "base_format": "bf16"}),
    ("QLoRA", {"base_format": "nf4"}),
)


def climb(scale: str, measured: bool) -> list[dict[str, Any]]:
    """Every rung of a scale, from the lowest."""
    base = from_data(SCALES[scale], Request, where="the ladder")
    told, rows = dict(BASE), []
    for name, changes in RUNGS:
        row: dict[str, Any] = {"rung": name, "sets": changes}
        try:
            request = api.change(base, told | changes)
            row |= weigh(request, measured=measured and scale == "small")
            told |= changes
        except Error as error:  # the rungs above stand on those below that exist
            row["refused"] = error.message
        rows.append(row)
        print(scale, json.dumps(row), flush=True)
    return rows


def weigh(request: Request, *, measured: bool) -> dict[str, Any]:
    plan = api.predict(request)
    proof = api.certify(plan.recipe, usable=plan.memory.usable)
    predicted, certified = plan.memory.peak_allocated, proof.memory.peak_allocated
    row: dict[str, Any] = {
        "predicted": predicted, "certified": certified,
        "predicted_off": round(predicted / certified - 1, 6),
        "step_seconds": plan.time.step_seconds,
    }  # fmt: skip
    if measured:
        found = api.measure(plan.recipe, steps=2)
        row["measured"] = max(found.phases.values())
        row["certified_off"] = round(certified / row["measured"] - 1, 6)
    return row


def page(scales: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["# The ladder", "", "<!-- written by bench/ladder.py -->", ""]
    for scale, rows in scales.items():
        lines += [
            f"## {scale}", "",
            "| rung | predicted | certified | measured | predicted is off | certified is off"
            " | a step |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        for row in rows:
            if "refused" in row:
                lines.append(f"| {row['rung']} | not here: {row['refused']} | | | | | |")
                continue
            seconds = row["step_seconds"]
            cells = [
                show_bytes(row["predicted"]), show_bytes(row["certified"]),
                show_bytes(row["measured"]) if "measured" in row else "",
                f"{row['predicted_off']:+.3%}",
                f"{row['certified_off']:+.3%}" if "measured" in row else "",
                show_seconds(seconds) if seconds else "unknown",
            ]  # fmt: skip
            lines.append(f"| {row['rung']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    found = {scale: climb(scale, asked.measure) for scale in asked.only}
    print(page(found))
    if asked.write:
        OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        OUT.with_suffix(".md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
