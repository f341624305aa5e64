"""What DeepSeek-V2 and -V3 share: the keys of their configs, and the rows of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.families.shared.config import activation, flag, refuse, rope, size
from memfit.families.shared.experts import expert_rows, router_rows
from memfit.families.shared.weights import (
    Rows,
    decoder,
    gated_config,
    gated_rows,
    linear,
    norm_rows,
)
from memfit.records.model import Architecture, Experts, Latent, Weight


def latent_architecture(
    config: Mapping[str, Any], family: str, experts: Experts, defaults: Mapping[str, int]
) -> Architecture:
    """The keys that both configs have; `defaults` are those of Hugging Face's class.

    Raises InvalidRequest: a key is missing or no number, or names what neither class builds.
    """
    heads = size(config, "num_attention_heads")
    refuse(config, "num_key_value_heads", (None, heads))
    refuse(config, "moe_layer_freq", (1,))
    rope(config)
    latent = Latent(
        kv_rank=size(config, "kv_lora_rank", 512),
        query_rank=_query_rank(config),
        rotated=size(config, "qk_rope_head_dim", 64),
        unrotated=size(config, "qk_nope_head_dim", 128),
        value=size(config, "v_head_dim", 128),
    )
    if latent.rotated % 2:
        raise InvalidRequest(f"`qk_rope_head_dim: {latent.rotated}` in config.json is odd")
    bias = flag(config, "attention_bias", False)
    return Architecture(
        family=family,
        layers=size(config, "num_hidden_layers"),
        hidden=size(config, "hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=latent.rotated + latent.unrotated,
        ffn=size(config, "intermediate_size"),
        vocab=size(config, "vocab_size"),
        max_sequence=size(config, "max_position_embeddings", defaults["max_position_embeddings"]),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        attention_bias=bias,
        output_bias=bias,
        rotary_dim=latent.rotated,
        activation=activation(config, "hidden_act", "silu"),
        experts=experts,
        latent=latent,
    )


def _query_rank(config: Mapping[str, Any]) -> int:
    """0 where the queries are not compressed, which config.json writes as null."""
    compressed = "q_lora_rank" not in config or config["q_lora_rank"] is not None
    return size(config, "q_lora_rank", 1536) if compressed else 0


def latent_config(a: Architecture) -> dict[str, Any]:
    """The keys of config.json that both classes read."""
    experts, latent = a.experts, a.latent
    common = gated_config(a)
    del common["head_dim"]
    return common | {
        "attention_bias": a.attention_bias,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_rope_head_dim": latent.rotated,
        "qk_nope_head_dim": latent.unrotated,
        "v_head_dim": latent.value,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": experts.shared_ffn // experts.ffn,
        "first_k_dense_replace": experts.dense_layers,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
    }


def latent_weights(a: Architecture) -> tuple[Weight, ...]:
    """All weights: the first layers have a plain feed-forward, the others experts."""
    experts = expert_rows(a) + router_rows(a)
    experts += gated_rows("mlp.shared_experts", a, a.experts.shared_ffn)
    return decoder(a, _block(a, experts), first=_block(a, gated_rows("mlp", a, a.ffn)))


def _block(a: Architecture, feed_forward: Rows) -> Rows:
    latent = a.latent
    query = a.heads * a.head_dim
    rows: Rows = []
    if latent.query_rank:
        rows += linear("self_attn.q_a_proj", latent.query_rank, a.hidden, a.attention_bias)
        rows += [("self_attn.q_a_layernorm.weight", (latent.query_rank,))]
        rows += linear("self_attn.q_b_proj", query, latent.query_rank, False)
    else:
        rows += linear("self_attn.q_proj", query, a.hidden, False)
    compressed = latent.kv_rank + latent.rotated
    rows += linear("self_attn.kv_a_proj_with_mqa", compressed, a.hidden, a.attention_bias)
    rows += [("self_attn.kv_a_layernorm.weight", (latent.kv_rank,))]
    expanded = a.heads * (latent.unrotated + latent.value)
    rows += linear("self_attn.kv_b_proj", expanded, latent.kv_rank, False)
    rows += linear("self_attn.o_proj", a.hidden, a.heads * latent.value, a.output_bias)
    return rows + feed_forward + norm_rows(a)
