"""NVIDIA-NeMo/Automodel: its performance page on H100, and figures in its GB200 recipes.

What both leave out is in examples/llm_benchmark: experts in weights that stay gathered between
forward and backward, no clipping, mock data with balanced routing, DeepEP on H100 and HybridEP on
GB200. A local batch (LBS) fills and drains a pipeline once.
"""

from __future__ import annotations

from typing import Any

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    number_in,
    task_of,
)
from published.megatron_bridge import CATALOGUE, qwen3_config

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PRECISIONS = {"bf16": "bf16", "mxfp8": "fp8-mixed"}


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c, extra = row["config"], str(row["config"].get("extra"))
    if c["precision"] not in PRECISIONS:
        raise NotExpressible(f"precision {c['precision']}")
    kernels = extra.partition(":")[2].partition(";")[0]
    experts = next((word for word in ("gmm", "torch_mm") if word in kernels), "te")
    sparse = bool(row["model"].get("n_experts"))
    gb200 = row["hardware"]["gpu"].startswith("GB")
    request: dict[str, Any] = {
        "framework": "automodel",
        "model": _config(row),
        "task": task_of(row),
        "precision": PRECISIONS[c["precision"]],
        "micro_batch": c["micro_batch"],
        "attention": "cudnn",
        "recompute": "full" if c["recompute"] == "full" else "none",
        "compile": "blocks" if str(c.get("compile")).startswith("yes") else "none",
        "parallel": {
            "dp_shard": c["dp"], "reshard_after_forward": not sparse, "tp": c["tp"],
            "cp": c.get("cp") or 1, "pp": c["pp"], "virtual_pp": c.get("vp") or 1,
            "ep": c.get("ep") or 1,
        },
        "hardware": hardware_of(row),
        "options": {
            "experts": experts, "dispatcher": "hybridep" if gb200 else "deepep",
            "local_batch": number_in(extra, r"LBS (\d+)") or 0,
        },
    }  # fmt: skip
    if lora := c.get("lora"):
        targets = ALL if lora["targets"] == "*_proj" else lora["targets"].split(",")
        request |= {"method": "lora", "lora": {"rank": lora["rank"], "targets": targets}}
    lost = "experts under FSDP2 with Transformer Engine's kernels: not described"
    return Translated(request, kind_of(row), memory_lost=lost)


def _config(row: Published) -> dict[str, Any] | str:
    m = row["model"]
    if m["name"] in CATALOGUE:
        return CATALOGUE[m["name"]]
    if m["name"].startswith("Qwen3"):
        return qwen3_config(row)
    if m["name"].startswith("Qwen2.5"):
        return llama_config(row, model_type="qwen2")
    if m.get("n_experts"):
        raise NotExpressible(f"experts of {m['name']}")
    return llama_config(row)
