"""yanring/Megatron-MoE-ModelZoo: best practices of Megatron-core's experts on H100.

`norm, act` are Megatron's modules `layernorm` and `moe_act`; DeepEP or the all-to-all dispatcher,
1F1B overlap and Megatron-FSDP are in the row's words. Its scripts overlap both of the data-parallel
collectives and force balanced routing.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, task_of
from published.megatron_bridge import OVERLAPS, qwen3_config, split_options

MODULES = {"norm": "layernorm", "act": "moe_act"}


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c, extra = row["config"], str(row["config"].get("extra"))
    kind, _, said = str(c["recompute"]).partition(":")
    words = [word.strip() for word in said.split(",") if word.strip()]
    if set(words) - set(MODULES) or not row["model"]["name"].startswith("Qwen3"):
        raise NotExpressible(f"{row['model']['name']} with recompute {c['recompute']}")
    whole = "Megatron FSDP" in extra
    options: dict[str, Any] = dict.fromkeys(OVERLAPS, True) | {
        "moe_token_dispatcher_type": "deepep" if "DeepEP" in extra else "alltoall",
        "overlap_moe_expert_parallel_comm": "1F1B overlap" in extra,
        "use_megatron_fsdp": whole, "expert_tensor_parallel_size": 1,
        "cross_entropy_loss_fusion": "te", "create_attention_mask_in_dataloader": False,
    }  # fmt: skip
    if words:
        options["recompute_modules"] = ",".join(MODULES[word] for word in words)
    request: dict[str, Any] = {
        "framework": "megatron",
        "model": qwen3_config(row),
        "task": task_of(row),
        "precision": c["precision"],
        "micro_batch": c["micro_batch"],
        "attention": "cudnn",
        "recompute": kind,
        "parallel": {
            "dp_shard": c["dp"], "zero": 3 if whole else 1, "tp": c["tp"], "pp": c["pp"],
            "virtual_pp": c.get("vp") or 1, "ep": c["ep"], "sequence_parallel": bool(c["sp"]),
        },
        "hardware": hardware_of(row),
        "options": options | split_options(row),
    }  # fmt: skip
    return Translated(request, kind_of(row))
