"""NVIDIA-NeMo/Megatron-Bridge: Megatron-core by named recipes, its verification cards and studies.

A recipe's defaults, where a row does not say otherwise: Transformer Engine's fused loss
(scripts/performance), main gradients in fp32 (recipes/common.py), no attention mask, no dropout.
"""

from __future__ import annotations

import re
from typing import Any

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    task_of,
)
from published.simumax import deepseek_config

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    for name in ("dp", "tp", "pp", "micro_batch", "global_batch", "precision", "recompute"):
        if not c.get(name):
            raise NotExpressible(f"`{name}` is not stated")
    if not c["precision"].startswith("bf16"):
        raise NotExpressible(f"precision {c['precision']}, with copies of weights in it")
    if "CUDA graph" in row["notes"]:
        raise NotExpressible("CUDA graphs, which keep pools of their own")
    recompute, options = _recompute(str(c["recompute"]))
    request = {
        "model": _config(row),
        "framework": "megatron",
        "task": task_of(row),
        "precision": "bf16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "cudnn",
        "recompute": recompute,
        "parallel": {
            "dp_shard": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"], "cp": c.get("cp") or 1,
            "virtual_pp": c.get("vp") or 1, "ep": c.get("ep") or 1,
            "sequence_parallel": bool(c.get("sp", c["tp"] > 1)) and c["tp"] > 1,
        },
        "hardware": hardware_of(row),
        "options": options | _options(row),
    }  # fmt: skip
    if lora := c.get("lora"):
        targets = [name.strip() for name in lora["targets"].split(",")]
        if not set(targets) <= set(LINEARS):
            raise NotExpressible(f"adapters beside {lora['targets']}")
        request |= {"method": "lora", "lora": {"rank": lora["rank"], "targets": targets}}
    return Translated(request, kind_of(row))


def _recompute(said: str) -> tuple[str, dict[str, Any]]:
    """`none`, `full`, or `selective: MODULE, …` with Megatron's names of modules."""
    if said.startswith("selective"):
        modules = re.findall(r"[a-z_]+", said.partition(":")[2]) or ["core_attn"]
        return "selective", {"recompute_modules": ",".join(modules)}
    if said not in ("none", "full"):
        raise NotExpressible(f"recompute {said}")
    return said, {}


def _options(row: Published) -> dict[str, Any]:
    c = row["config"]
    aware = "bf16 grads/moments" in str(c.get("optimizer"))
    options: dict[str, Any] = {
        "cross_entropy_loss_fusion": {"native": "native", False: "none"}.get(
            c.get("fused_ce", "te"), "te"
        ),
        "create_attention_mask_in_dataloader": False,
        "accumulate_allreduce_grads_in_fp32": "bf16" not in str(c.get("grad_dtype")),
        "exp_avg_dtype": "bf16" if aware else "fp32",
        "exp_avg_sq_dtype": "bf16" if aware else "fp32",
    }
    if row["model"].get("n_experts"):
        options["expert_tensor_parallel_size"] = 1
    return options


def _config(row: Published) -> dict[str, Any]:
    m = row["model"]
    if "mla" in str(m.get("arch")):
        return deepseek_config(row)
    if not m["name"].startswith("Qwen3"):
        if m.get("n_experts"):
            raise NotExpressible(f"experts of {m['name']}")
        return llama_config(row)
    changes: dict[str, Any] = {"model_type": "qwen3", "head_dim": m.get("head_dim") or 128}
    if m.get("n_experts"):
        changes |= {
            "model_type": "qwen3_moe", "num_experts": m["n_experts"],
            "num_experts_per_tok": m["top_k"], "moe_intermediate_size": m["moe_ffn"],
            "intermediate_size": m.get("ffn") or m["moe_ffn"],
        }  # fmt: skip
        return llama_config({**row, "model": {**m, "ffn": m.get("ffn") or m["moe_ffn"]}}, **changes)
    return llama_config(row, **changes)
