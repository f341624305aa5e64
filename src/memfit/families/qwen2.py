"""Qwen2 and Qwen2.5 (2407.10671; Hugging Face's `qwen2`)."""

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
    window_config,
    windows,
)
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Qwen2(GatedFamily):
    """Llama's block with a bias on query, key and value."""

    name = "qwen2"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen2Config`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        kv_heads = key_value_heads(config, heads, absent=32)
        whole_head_rotates(config)
        layers = size(config, "num_hidden_layers")
        window, kinds = windows(config, layers)
        head_dim = head_size(config, hidden, heads)
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
            attention_bias=True,
            rotary_dim=head_dim,
            activation=activation(config, "hidden_act", "silu"),
            sliding_window=window,
            layer_kinds=kinds,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | window_config(a)


families.register("qwen2")(Qwen2())
