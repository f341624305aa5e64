"""MooreThreads/SimuMax: Megatron-LM on 8 B200, allocated and reserved bytes of every rank.

Source of what the rows leave out: simu_tools/megatron_scripts of the repository (Transformer
Engine's fused loss, no biases, no dropout, the distributed optimizer).
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


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    request = {
        "model": _config(row),
        "framework": "megatron",
        "task": task_of(row),
        "precision": "bf16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "cudnn",
        "recompute": c["recompute"],
        "parallel": {
            "dp_shard": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"], "cp": c["cp"],
            "virtual_pp": c["vp"], "ep": c["ep"], "sequence_parallel": bool(c["sp"]),
        },
        "hardware": hardware_of(row),
        "options": {
            "cross_entropy_loss_fusion": "te" if c["fused_ce"] else "none",
            "create_attention_mask_in_dataloader": False,
            "cp_comm_type": "a2a",
        } | ({"expert_tensor_parallel_size": 1} if row["model"].get("n_experts") else {}),
    }  # fmt: skip
    return Translated(request, kind_of(row))


def _config(row: Published) -> dict[str, Any]:
    return deepseek_config(row) if row["model"].get("n_experts") else llama_config(row)


def deepseek_config(row: Published) -> dict[str, Any]:
    """config.json of experts with latent attention, from the row's words for its sizes."""
    m = row["model"]
    arch = m["arch"]
    sizes = {
        "q_lora_rank": 0 if "no q_lora" in arch else number_in(arch, r"q_lora (\d+)"),
        "kv_lora_rank": number_in(arch, r"kv_lora (\d+)"),
        "qk_nope_head_dim": number_in(arch, r"qk_nope (\d+)"),
        "qk_rope_head_dim": number_in(arch, r"rope (\d+)"),
        "v_head_dim": number_in(arch, r", v (\d+)"),
        "first_k_dense_replace": 1 if "first layer dense" in arch
        else number_in(arch, r"(\d+) dense"),
    }  # fmt: skip
    if None in sizes.values():
        raise NotExpressible(f"experts of `{arch}`")
    several = (number_in(arch, r"(\d+) shared experts") or 1) * m["moe_ffn"]
    shared = number_in(arch, r"shared-expert ffn (\d+)") or several
    sizes["q_lora_rank"] = sizes["q_lora_rank"] or None
    return {
        "name": m["name"], "model_type": "deepseek_v2", "vocab_size": m["vocab"],
        "hidden_size": m["hidden"], "intermediate_size": m["ffn"],
        "num_hidden_layers": m["n_layers"], "num_attention_heads": m["heads"],
        "num_key_value_heads": m["heads"], "n_routed_experts": m["n_experts"],
        "num_experts_per_tok": m["top_k"], "moe_intermediate_size": m["moe_ffn"],
        "n_shared_experts": shared // m["moe_ffn"], "max_position_embeddings": m["seq_len"],
        "tie_word_embeddings": False, **sizes,
    }  # fmt: skip
