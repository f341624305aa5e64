"""Mistral 7B and Large (Jiang et al. 2310.06825; Hugging Face's `mistral`)."""

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
class Mistral(GatedFamily):
    """Llama's block without any bias; the first release looks back over a sliding window."""

    name = "mistral"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `MistralConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        kv_heads = key_value_heads(config, heads, absent=8)
        whole_head_rotates(config)
        head_dim = head_size(config, hidden, heads)
        window = config.get("sliding_window", 4096)
        return Architecture(
            family=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=size(config, "intermediate_size"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 4096 * 32),
            tied_embeddings=flag(config, "tie_word_embeddings", False),
            rotary_dim=head_dim,
            activation=activation(config, "hidden_act", "silu"),
            sliding_window=0 if window is None else size(config, "sliding_window", 4096),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {"sliding_window": a.sliding_window or None}


families.register("mistral")(Mistral())
