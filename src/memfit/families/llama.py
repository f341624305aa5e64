"""Llama 1 to 3.3, TinyLlama, SmolLM2 (Touvron et al. 2302.13971; Hugging Face's `llama`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit.families import families
from memfit.families.shared.config import (
    activation,
    flag,
    head_size,
    key_value_heads,
    size,
    whole_head_rotates,
)
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Llama(GatedFamily):
    """RMSNorm, rotary positions, grouped attention, gated feed-forward."""

    name = "llama"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `LlamaConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        kv_heads = key_value_heads(config, heads, absent=heads)
        whole_head_rotates(config)
        head_dim = head_size(config, hidden, heads)
        bias = flag(config, "attention_bias", False)
        return Architecture(
            family=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=size(config, "intermediate_size"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", False),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=flag(config, "mlp_bias", False),
            rotary_dim=head_dim,
            activation=activation(config, "hidden_act", "silu"),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        biases = {"attention_bias": a.attention_bias, "mlp_bias": a.mlp_bias}
        return gated_config(a) | biases


families.register("llama")(Llama())
