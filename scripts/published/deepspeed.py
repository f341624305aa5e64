"""deepspeedai/DeepSpeed's blogs and examples: Hugging Face's classes under ZeRO."""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config


def translate(row: Published) -> Translated:
    """See the package."""
    c, name = row["config"], row["model"]["name"]
    if not name.startswith("Qwen3"):
        raise NotExpressible(f"the family of `{name}` is not described")
    request: dict[str, Any] = {
        "framework": "deepspeed",
        "model": llama_config(row, model_type="qwen3"),
        "hardware": hardware_of(row),
        "task": {
            "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": c["global_batch"],
        },
        "micro_batch": c["micro_batch"],
        "precision": "bf16-mixed",
        "method": "full",
        "recompute": "full" if c.get("recompute") == "full" else "none",
        "parallel": {"dp_shard": c["dp"], "zero": c["zero_stage"]},
    }  # fmt: skip
    return Translated(request, kind_of(row))
