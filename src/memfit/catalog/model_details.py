"""What a row of models.toml says of experts, latent and linear attention, in memfit's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXPERTS = {
    "n_experts": "count",
    "top_k": "per_token",
    "moe_ffn": "ffn",
    "dense_layers": "dense_layers",
    "norm_top_k": "normalised",
    "n_group": "groups",
    "topk_group": "groups_per_token",
}
_LATENT = {
    "kv_lora_rank": "kv_rank",
    "q_lora_rank": "query_rank",
    "qk_rope_head_dim": "rotated",
    "qk_nope_head_dim": "unrotated",
    "v_head_dim": "value",
}
_LINEAR = {
    "linear_key_heads": "key_heads",
    "linear_value_heads": "value_heads",
    "linear_key": "key",
    "linear_value": "value",
    "linear_kernel": "kernel",
}
_NOT_TRAINED = ("mtp_layers",)  # blocks that predict further tokens; Hugging Face drops them


def architecture_fields(details: Mapping[str, Any]) -> dict[str, Any]:
    """The details of a row as fields of `Architecture`; nested where it nests them.

    A row's shared experts are `shared_experts` of the routed ones' width, or one of `shared_ffn`.
    Of latent attention, the part of a head that is rotated is the rotary size.
    """
    left = {key: value for key, value in details.items() if key not in _NOT_TRAINED}
    if "kv_lora_rank" in left:
        latent = {new: left.pop(old) for old, new in _LATENT.items() if old in left}
        left |= {"latent": latent, "rotary_dim": latent["rotated"]}
    if "linear_key_heads" in left:
        left["linear"] = {new: left.pop(old) for old, new in _LINEAR.items()}
    if "n_experts" not in left:
        return left
    experts = {new: left.pop(old) for old, new in _EXPERTS.items() if old in left}
    joined = left.pop("shared_experts", 0) * experts["ffn"]
    experts["shared_ffn"] = left.pop("shared_ffn", joined)
    return {**left, "experts": experts}
