"""Gemma 3, text alone (2503.19786; Hugging Face's `gemma3_text`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import (
    GEMMA_NORMS,
    head_norm_attention,
    scaled_embedding,
    unit_norm,
)
from memfit.families.shared.config import (
    cap,
    cycle,
    flag,
    layer_types_config,
    pattern_of_windows,
    read_decoder,
    refuse,
    rope_by_kind,
    size,
)
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
)
from memfit.families.shared.gated import SandwichFamily, by_name, kinds
from memfit.families.shared.weights import decoder, gated_block, gated_config, rotary_buffers
from memfit.meta import Tensor
from memfit.records.model import SLIDING, Architecture, TensorSpec, Weight


@final
class Gemma3Text(SandwichFamily):
    """Gemma 2's block with norms over heads, no capped scores, and a rotation for each kind."""

    name = "gemma3_text"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    norm = staticmethod(by_name(unit_norm))
    norms = GEMMA_NORMS
    embed_rows = staticmethod(scaled_embedding)
    rotates_by_kind = True

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Gemma3TextConfig`.

        Its class reads `attn_logit_softcapping` and does not apply it.
        """
        refuse(config, "use_bidirectional_attention", (None, False))
        rope_by_kind(config)
        a = read_decoder(
            config, self.name, kv_heads=4, head_dim=256, positions=131072, tied=True,
            act=("hidden_activation", "gelu_pytorch_tanh"), rotation="read",
        )  # fmt: skip
        bias = flag(config, "attention_bias", False)
        pattern = pattern_of_windows(config, a.layers, 6)
        return replace(
            a,
            attention_bias=bias,
            output_bias=bias,
            qk_norm=True,
            sliding_window=size(config, "sliding_window", 4096) if SLIDING in pattern else 0,
            layer_kinds=cycle(pattern),
            logit_cap=cap(config, "final_logit_softcapping", None),
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
            "final_logit_softcapping": a.logit_cap or None,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = gated_block(a)
        rows += [(f"{name}.weight", (a.hidden,)) for name in GEMMA_NORMS[2:]]
        return decoder(a, rows)

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`; the embedding's factor, and frequencies of each kind of block."""
        return (TensorSpec(shape=()), *rotary_buffers(a) * len(kinds(a)))

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return head_norm_attention(forward, weights, x, turn, unit_norm)


families.register("gemma3_text")(Gemma3Text())
