"""QwenLM/Qwen's profiling table: finetune.py with Hugging Face's Trainer, batches of one."""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of
from published._qwen1 import config, targets


def translate(row: Published) -> Translated:
    """See the package."""
    c, devices = row["config"], row["hardware"]["n_gpus"]
    quant, lora = c.get("quant"), c.get("lora")
    if quant and not quant.startswith("gptq int4"):
        raise NotExpressible(f"weights stored as {quant} are not described")
    saved = bool(lora) and "trained" in lora["targets"]
    lost = f"weights stored as {quant} are not described" if quant else ""
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
        "precision": "fp16-mixed" if quant else "bf16-mixed",
        "method": "lora" if lora else "full",
        "base_format": "int4" if quant else "bf16",
        "recompute": "full" if c["recompute"] == "full" else "none",
        "optimizer": {"implementation": "foreach"},
    }  # fmt: skip
    if lora:
        asked = targets(lora["targets"].partition(" + ")[0])
        request["lora"] = {"rank": lora["rank"], "targets": asked, "dropout": 0.05}
    if saved:
        request["options"] = {"modules_to_save": "embed_tokens,lm_head"}
    if sharded:
        request["parallel"] = {"dp_shard": devices, "zero": c["zero_stage"]}
    return Translated(request, kind_of(row), memory_lost=lost)
