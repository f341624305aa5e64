"""Tiny configs of the families whose sizes are named as Llama's are."""

from __future__ import annotations

from typing import Any

from memfit.families import families, families_that, find_family

_HYBRID = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "full_attention_interval": 2,
}  # fmt: skip
_FEW = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
# What each class has beside the sizes that all share; no padding token outside a small vocabulary.
_OWN: dict[str, dict[str, Any]] = {
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True, "sliding_window": 8},
    "gemma3_text": {
        "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
    "olmo2": {"eos_token_id": 1}, "olmo3": {"eos_token_id": 1},
    "granite": {
        "logits_scaling": 8.0, "residual_multiplier": 0.25, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1, "mlp_bias": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": {"head_dim": 16},
    "stablelm": {"use_parallel_residual": True},
    "phi": {"hidden_act": "gelu_new"},
    "hunyuan_v1_dense": {"head_dim": 16},
    "cohere2": {"sliding_window": 64, "sliding_window_pattern": 2},
    "exaone4": {"head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2},
    "minimax_m2": {
        "head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe_lite": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "qwen3_5_text": _HYBRID, "qwen3_5_moe_text": _HYBRID | _FEW,
    "qwen3_next": _HYBRID | _FEW,
}  # fmt: skip
# windows shorter than a test's rows; other families that have windows take the last
_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5}, "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 5},
    "gemma2": {"sliding_window": 3}, "mixtral": {"sliding_window": 9},
    "": {"sliding_window": 7},
}  # fmt: skip
SLIDING = {name: _WINDOWS.get(name, _WINDOWS[""]) for name in families_that("windows")}
LORA_TARGETS = {
    "phi3": ("qkv_proj", "down_proj"), "glm4_moe_lite": ("q_b_proj", "kv_b_proj"),
    # blocks before the first adapter have no gradient, so that the first cycle would be another
    **{name: find_family(name).lora_targets for name in ("qwen3_5_moe_text", "qwen3_next")},
}  # fmt: skip


def gated(common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A config of each family; common: the sizes, as of a tiny Llama."""
    return {name: of_family(name, common) for name in _OWN}


def of_family(name: str, common: dict[str, Any]) -> dict[str, Any]:
    """The config of one family; common: as of `gated`."""
    return {"model_type": name, **common, "pad_token_id": None, **_OWN.get(name, {})}


def add_others(configs: dict[str, dict[str, Any]], common: dict[str, Any]) -> None:
    """Give each registered family without a config one of its own; common: as of `gated`."""
    for name in families:
        configs.setdefault(name, of_family(name, common))
