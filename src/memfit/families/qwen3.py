"""Qwen3, dense (2505.09388; Hugging Face's `qwen3`)."""

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
    window_config,
    windows,
)
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Qwen3(GatedFamily):
    """Llama's block with an RMSNorm over each head of query and key."""

    name = "qwen3"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3Config`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        kv_heads = key_value_heads(config, heads, absent=32)
        whole_head_rotates(config)
        layers = size(config, "num_hidden_layers")
        window, kinds = windows(config, layers)
        head_dim = size(config, "head_dim", 128)
        bias = flag(config, "attention_bias", False)
        return Architecture(
            family=self.name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=size(config, "intermediate_size"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 32768),
            tied_embeddings=flag(config, "tie_word_embeddings", False),
            attention_bias=bias,
            output_bias=bias,
            qk_norm=True,
            rotary_dim=head_dim,
            activation=activation(config, "hidden_act", "silu"),
            sliding_window=window,
            layer_kinds=kinds,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | window_config(a) | {"attention_bias": a.attention_bias}


families.register("qwen3")(Qwen3())
