"""Tiny configs of the families whose sizes are named as Llama's are."""

from __future__ import annotations

from typing import Any

# What each class has beside the sizes that all share; no padding token outside a small vocabulary.
_OWN: dict[str, dict[str, Any]] = {
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True, "sliding_window": 8},
    "gemma3_text": {
        "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
    "olmo2": {"eos_token_id": 1},
    "granite": {
        "logits_scaling": 8.0, "residual_multiplier": 0.25, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1, "mlp_bias": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": {"head_dim": 16},
    "stablelm": {"use_parallel_residual": True},
    "phi": {"hidden_act": "gelu_new"},
}  # fmt: skip
LORA_TARGETS = {"phi3": ("qkv_proj", "down_proj")}


def gated(common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A config of each family; common: the sizes, as of a tiny Llama."""
    return {
        name: {"model_type": name, **common, "pad_token_id": None, **own}
        for name, own in _OWN.items()
    }
