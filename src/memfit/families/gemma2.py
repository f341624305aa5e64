"""Gemma 2 (2408.00118; Hugging Face's `gemma2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.blocks import GEMMA_NORMS, scaled_embedding, unit_norm
from memfit.families.shared.config import (
    cap,
    cycle,
    flag,
    layer_types,
    layer_types_config,
    read_decoder,
    refuse,
    size,
)
from memfit.families.shared.gated import SandwichFamily, by_name
from memfit.families.shared.weights import decoder, gated_block, gated_config, rotary_buffers
from memfit.records.model import SLIDING, Architecture, TensorSpec, Weight


@final
class Gemma2(SandwichFamily):
    """Norms before and after each part, capped scores and logits; every other block slides."""

    name = "gemma2"
    windows = True
    attention_class = AttentionClass(only_eager=True)
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    norm = staticmethod(by_name(unit_norm))
    norms = GEMMA_NORMS
    embed_rows = staticmethod(scaled_embedding)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Gemma2Config`."""
        refuse(config, "use_bidirectional_attention", (None, False))
        a = read_decoder(
            config, self.name, kv_heads=4, head_dim=256, positions=8192, tied=True,
            act=("hidden_activation", "gelu_pytorch_tanh"),
        )  # fmt: skip
        bias = flag(config, "attention_bias", False)
        kinds = layer_types(config, a.layers)
        if kinds is None:
            kinds = ["" if layer % 2 else SLIDING for layer in range(a.layers)]
        return replace(
            a,
            attention_bias=bias,
            output_bias=bias,
            sliding_window=size(config, "sliding_window", 4096) if SLIDING in kinds else 0,
            layer_kinds=cycle(kinds),
            attention_cap=cap(config, "attn_logit_softcapping", 50.0),
            logit_cap=cap(config, "final_logit_softcapping", 30.0),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        common = gated_config(a)
        return {
            **common,
            "hidden_activation": common.pop("hidden_act"),
            "attention_bias": a.attention_bias,
            "sliding_window": a.sliding_window or None,
            "layer_types": layer_types_config(a),
            "attn_logit_softcapping": a.attention_cap or None,
            "final_logit_softcapping": a.logit_cap or None,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = gated_block(a)
        rows += [(f"{name}.weight", (a.hidden,)) for name in GEMMA_NORMS[2:]]
        return decoder(a, rows)

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`; the embedding holds its factor."""
        return (TensorSpec(shape=()), *rotary_buffers(a))


families.register("gemma2")(Gemma2())
