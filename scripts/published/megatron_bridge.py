"""NVIDIA-NeMo/Megatron-Bridge: Megatron-core by named recipes, its verification cards and studies.

NeMo before it, and what is built like both, are read alike; GPT-3's sizes are GPT-2's.

A recipe's defaults, where a row does not say otherwise: Transformer Engine's fused loss
(scripts/performance), main gradients in fp32 (recipes/common.py), no attention mask, no dropout.
What the performance pages leave out of a run is in its recipe (perf_recipes at 067f987, by model,
device, precision and layout in `megatron_bridge_recipes.json`): overlaps, dispatcher, CUDA graphs,
pipeline layout. A page of another release may have run an older recipe; the row's notes say so.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
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
from published.llm_foundry import gpt2_config
from published.simumax import deepseek_config

PRECISIONS = {  # how a row's begins -> the recipe's, and Megatron's --fp8-recipe
    "bf16": ("bf16-mixed", ""), "fp8 (per-tensor current": ("fp8-mixed", "tensorwise"),
    "fp8": ("fp8-mixed", "delayed"), "mxfp8": ("fp8-mixed", "mxfp8"), "nvfp4": ("fp4-mixed", ""),
}  # fmt: skip
WORDS = {  # the same -> as recipes' names end
    "bf16": "bf16", "fp8 (per-tensor current": "fp8cs", "mxfp8": "fp8mx", "nvfp4": "nvfp4",
}  # fmt: skip
CATALOGUE = {  # models whose sizes a row does not state in full -> the catalogue's
    "DeepSeek-V3": "deepseek-v3", "GPT-OSS-120B": "gpt-oss-120b", "GPT-OSS-20B": "gpt-oss-20b",
    "Kimi-K2": "kimi-k2-instruct",
}  # fmt: skip
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")  # both, on several ranks
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    for name in ("dp", "tp", "pp", "micro_batch", "global_batch", "precision", "recompute"):
        if not c.get(name):
            raise NotExpressible(f"`{name}` is not stated")
    precision, scaling = _precision(c["precision"])
    recompute, options = _recompute(str(c["recompute"]))
    found, assumed = _recipe(row)
    whole = c.get("zero_stage") == 3
    request = {
        "model": _config(row),
        "framework": "megatron",
        "task": task_of(row),
        "precision": precision,
        "micro_batch": c["micro_batch"],
        "attention": "eager" if "unfused" in str(c.get("attention")) else "cudnn",
        "recompute": recompute,
        "parallel": {
            "dp_shard": c["dp"], "zero": 3 if whole else 1, "tp": c["tp"], "pp": c["pp"],
            "cp": c.get("cp") or 1, "virtual_pp": c.get("vp") or 1, "ep": c.get("ep") or 1,
            "sequence_parallel": bool(c.get("sp", c["tp"] > 1)) and c["tp"] > 1,
        },
        "hardware": hardware_of(row),
        "options": found | scaling | options | _options(row) | split_options(row)
        | ({"use_megatron_fsdp": True} if whole else {}),
    }  # fmt: skip
    if lora := c.get("lora"):
        targets = [name.strip() for name in lora["targets"].split(",")]
        if not set(targets) <= set(LINEARS):
            raise NotExpressible(f"adapters beside {lora['targets']}")
        request |= {"method": "lora", "lora": {"rank": lora["rank"], "targets": targets}}
    copies = f"precision {c['precision']}, with copies of weights in it"
    graphs = "CUDA graphs, which keep pools of their own"
    lost = copies if precision != "bf16-mixed" else graphs if "CUDA graph" in row["notes"] else ""
    return Translated(request, kind_of(row), memory_lost=lost, assumed=assumed)


def _precision(said: str) -> tuple[str, dict[str, Any]]:
    """The recipe's word for a precision, and how FP8 values are scaled."""
    for start, (precision, scaling) in PRECISIONS.items():
        if said.startswith(start):
            return precision, {"fp8_recipe": scaling} if scaling else {}
    raise NotExpressible(f"precision {said}")


@cache
def _known() -> dict[str, Any]:
    file = Path(__file__).with_name("megatron_bridge_recipes.json")
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def _recipe(row: Published) -> tuple[dict[str, Any], str]:
    """Options of the performance recipe with the row's layout, and what is assumed of them."""
    c, m = row["config"], row["model"]
    release = re.search(r"\((\d\d)\.(\d\d)", row["source"])
    options: dict[str, Any] = dict.fromkeys(OVERLAPS, c["dp"] > 1)
    if release:
        options["version"] = int(f"20{release[1]}{release[2]}")
    layout = [c["tp"], c["pp"], c.get("cp") or 1, c.get("vp") or 1, c.get("ep") or 1]
    word = next((w for start, w in WORDS.items() if c["precision"].startswith(start)), "")
    device = row["hardware"]["gpu"].partition("-")[0].lower()
    alike = [
        known
        for known in _known()["recipes"]
        if (known["model"], known["device"], known["precision"]) == (m["name"], device, word)
        and [known[axis] for axis in ("tp", "pp", "cp", "vp", "ep")] == layout
    ]
    alike.sort(key=lambda known: known["devices"] != row["hardware"]["n_gpus"])
    if not alike:
        return options | _extra(row), "Dispatcher, CUDA graphs and tp's overlap are not stated."
    assumed = "Overlaps, dispatcher and CUDA graphs as in the recipe of today's release."
    return options | alike[0]["options"] | _extra(row), assumed


def _extra(row: Published) -> dict[str, Any]:
    """What the row itself says of knobs that its recipe may say otherwise."""
    c, m, notes = row["config"], row["model"], row["notes"]
    found: dict[str, Any] = {}
    away = number_in(c.get("offload"), r"activations of (\d+) layers")
    if away:
        found["cpu_offloading_num_layers"] = away
    if "ull-iteration CUDA graph" in notes:
        found["cuda_graph_scope"] = "full_iteration"
    if m["name"] == "DeepSeek-V3":
        further = _mtp(row)
        layout = _known()["deepseek_v3_layouts"].get(str(c["pp"] * (c.get("vp") or 1)), "")
        found["mtp_num_layers"] = int(further)
        if layout:
            found["pipeline_model_parallel_layout"] = (
                layout.replace("L", "mL") if further else layout
            )
    return found


def _mtp(row: Published) -> bool:
    """Whether a further token is predicted: said, or by the model FLOP that the page prints.

    The rows that say so print 260 GFLOP a token with it, and 250 without.
    """
    said = str(row["config"].get("extra"))
    if "MTP" in said:
        return "w/o" not in said
    measured = row["measured"]
    rate, flops = measured.get("tokens_per_s_per_gpu"), measured.get("tflops_per_gpu")
    return bool(rate and flops and 1000 * flops / rate > 255)


def split_options(row: Published) -> dict[str, Any]:
    """Embedding and head count as blocks where the blocks alone do not divide."""
    c, layers = row["config"], row["model"]["n_layers"]
    pieces = c["pp"] * (c.get("vp") or 1)
    if layers % pieces == 0 or (layers + 2) % pieces:
        return {}
    return {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }


def _recompute(said: str) -> tuple[Any, dict[str, Any]]:
    """`none`, `full`, `full on N of M layers`, or `selective: MODULE, …` by Megatron's names."""
    blocks = number_in(said, r"full on (\d+) of")
    if blocks:
        return {"blocks": blocks}, {}
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
        # the performance recipes reduce in bf16 (perf_recipes/_common.py)
        "accumulate_allreduce_grads_in_fp32": "bf16" not in str(c.get("grad_dtype"))
        and "performance-summary" not in row["source"],
        "exp_avg_dtype": "bf16" if aware else "fp32",
        "exp_avg_sq_dtype": "bf16" if aware else "fp32",
    }
    if row["model"].get("n_experts"):
        options["expert_tensor_parallel_size"] = 1
    return options


def _config(row: Published) -> dict[str, Any] | str:
    m = row["model"]
    if m["name"] in CATALOGUE:
        return CATALOGUE[m["name"]]
    if str(m.get("arch")) == "gpt" or m["name"].startswith("GPT3"):
        return gpt2_config(row)
    if "mla" in str(m.get("arch")):
        return deepseek_config(row)
    if m["name"].startswith("Qwen3"):
        return qwen3_config(row)
    if m.get("n_experts"):
        raise NotExpressible(f"experts of {m['name']}")
    return llama_config(row)


def qwen3_config(row: Published) -> dict[str, Any]:
    """config.json of a Qwen3 with the row's sizes, with experts or without."""
    m = row["model"]
    changes: dict[str, Any] = {"model_type": "qwen3", "head_dim": m.get("head_dim") or 128}
    if m.get("n_experts"):
        changes |= {
            "model_type": "qwen3_moe", "num_experts": m["n_experts"],
            "num_experts_per_tok": m["top_k"], "moe_intermediate_size": m["moe_ffn"],
            "intermediate_size": m.get("ffn") or m["moe_ffn"],
        }  # fmt: skip
        return llama_config({**row, "model": {**m, "ffn": m.get("ffn") or m["moe_ffn"]}}, **changes)
    return llama_config(row, **changes)
