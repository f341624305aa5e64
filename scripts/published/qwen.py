"""QwenLM/Qwen's profiling table: finetune.py with Hugging Face's Trainer, batches of one."""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of
from published._qwen1 import config, targets


def translate(row: Published) -> Translated:
    """See the package."""
    c, devices = row["config"], row["hardware"]["n_gpus"]
    if c.get("quant"):
        raise NotExpressible(f"weights stored as {c['quant']} are not described")
    if c.get("lora") and "trained" in c["lora"]["targets"]:
        raise NotExpressible(
            "adapters beside a trained copy of embedding and head (modules_to_save)"
        )
    sharded = (c.get("zero_stage") or 0) > 0
    request: dict[str, Any] = {
        "framework": "deepspeed" if sharded else "hf-trainer",
        "model": config(row),
        "hardware": hardware_of(row),
        "task": {
            "objective": "sft", "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": c["global_batch"],
        },
        "micro_batch": c["micro_batch"],
        "precision": "bf16-mixed",
        "method": "lora" if c.get("lora") else "full",
        "base_format": "bf16",
        "recompute": "full" if c["recompute"] == "full" else "none",
        "optimizer": {"implementation": "foreach"},
    }  # fmt: skip
    if c.get("lora"):
        asked = targets(c["lora"]["targets"])
        request["lora"] = {"rank": c["lora"]["rank"], "targets": asked, "dropout": 0.05}
    if sharded:
        request["parallel"] = {"dp_shard": devices, "zero": c["zero_stage"]}
    return Translated(request, kind_of(row))
