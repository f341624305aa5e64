"""Seed-OSS (ByteDance, 2025; Hugging Face's `seed_oss`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit.families import families
from memfit.families.shared.config import (
    activation,
    flag,
    key_value_heads,
    size,
    whole_head_rotates,
)
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class SeedOss(GatedFamily):
    """Llama's block with a bias on query, key and value, and heads of a size of their own."""

    name = "seed_oss"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout", "residual_dropout")

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `SeedOssConfig`."""
        heads = size(config, "num_attention_heads")
        whole_head_rotates(config)
        head_dim = size(config, "head_dim", 128)
        return Architecture(
            family=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden=size(config, "hidden_size"),
            heads=heads,
            kv_heads=key_value_heads(config, heads, absent=8),
            head_dim=head_dim,
            ffn=size(config, "intermediate_size"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 524288),
            tied_embeddings=flag(config, "tie_word_embeddings", False),
            attention_bias=flag(config, "attention_bias", True),
            output_bias=flag(config, "attention_out_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
            rotary_dim=head_dim,
            activation=activation(config, "hidden_act", "silu"),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "attention_out_bias": a.output_bias,
            "mlp_bias": a.mlp_bias,
        }


families.register("seed_oss")(SeedOss())
