"""AnswerDotAI/fsdp_qlora's benchmarks: train.py of March 2024, with what its defaults leave unsaid.

Hugging Face's class of transformers 4.38 in bf16, peft's adapters of rank 64 on six projections of
a block, FSDP1 or copies; peak reserved memory.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config

TARGETS = ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]  # "all" of train.py


def translate(row: Published) -> Translated:
    """See the package."""
    c, devices = row["config"], row["hardware"]["n_gpus"]
    quant, offload = said(c, "quant"), said(c, "offload")
    if "hqq" in quant:
        raise NotExpressible("weights quantised by HQQ are not described")
    if "activation" in offload:
        raise NotExpressible(f"offload of {offload} is not described")
    lora = c.get("lora")
    if not lora:
        raise NotExpressible("full finetuning by this script is not described")
    if row["model"].get("n_experts"):
        raise NotExpressible("Hugging Face's mixture of experts under FSDP1 is not described")
    micro = c["micro_batch"]
    accumulated = c.get("grad_accum") or 1
    request: dict[str, Any] = {
        "framework": "hf-trainer",
        "model": llama_config(row),
        "hardware": hardware_of(row),
        "task": {
            "objective": "sft", "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": micro * devices * accumulated,
        },
        "micro_batch": micro,
        "precision": "bf16-mixed" if "autocast" in said(c, "precision") else "bf16",
        "method": "lora",
        "lora": {"rank": lora.get("rank") or 64, "targets": targets(lora), "dropout": 0.1},
        "base_format": "nf4" if "4" in quant else "bf16",
        "optimizer": {"implementation": "foreach"},
        "recompute": "full" if said(c, "recompute").startswith(("full", "true")) else "none",
        "options": {
            "adapter_dtype": "base", "prepare_kbit": False, "double_quantisation": True,
            "keeps_outputs": True, "release": "4.38", "bitsandbytes": "0.43",
        },
    }  # fmt: skip
    sharded = devices > 1 and (c.get("zero_stage") == 3 or "full_shard" in said(c, "fsdp"))
    request["parallel"] = {"dp_shard" if sharded else "dp_replicate": devices}
    if offload not in ("none", "false", ""):
        request["offload"] = "parameters"
    return Translated(request, kind_of(row))


def said(config: dict[str, Any], key: str) -> str:
    """A field in lower case; empty where nothing is said."""
    return str(config.get(key) or "").lower()


def targets(lora: dict[str, Any]) -> list[str]:
    """The row's projections; the script's where they are not said."""
    words = [word.strip() for word in str(lora.get("targets") or "").split(",")]
    return words if all(word.endswith("_proj") for word in words) else TARGETS
