"""Qwen3.5, the text model of dense ones (Qwen, 2026; Hugging Face's `qwen3_5_text`).

The vision tower is another class's, and layers that predict further tokens (`mtp`) are no part of
the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import unit_norm
from memfit.families.shared.config import flag, fraction_of, read_decoder, refuse
from memfit.families.shared.forward import Forward, Rotation, Weights
from memfit.families.shared.gated import Decoder, by_name
from memfit.families.shared.hybrid.decoder import (
    delta_states,
    gated_output_attention,
    grid_rotation,
    hybrid_config,
    hybrid_weights,
    read_hybrid,
)
from memfit.families.shared.hybrid.delta_rule import GATES, gated_delta_net
from memfit.families.shared.weights import gated_config
from memfit.meta import Tensor
from memfit.records.model import DTYPE_BYTES, LINEAR, Architecture, RowState, Weight


@final
class Qwen35Text(Decoder):
    """Linear attention in three of four blocks, and attention with an output gate in the fourth."""

    name = "qwen3_5_text"
    text_of = "qwen3_5"
    lora_targets = ("q_proj", "v_proj", "in_proj_qkv")
    dropouts = ("attention_dropout",)
    state_gates = GATES
    norm = staticmethod(by_name(unit_norm))
    rotation = staticmethod(grid_rotation)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3_5TextConfig`."""
        a = read_decoder(
            config, self.name, kv_heads=4, head_dim=256, positions=32768, rotation=0.25
        )
        bias = flag(config, "attention_bias", False)
        refuse(config, "attn_output_gate", (None, True))
        linear, kinds = read_hybrid(config, a.layers)
        return replace(
            a, attention_bias=bias, output_bias=bias, qk_norm=True, output_gate=True,
            linear=linear, layer_kinds=kinds,
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        share = fraction_of(a.rotary_dim, a.head_dim)
        return gated_config(a) | hybrid_config(a) | {
            "attention_bias": a.attention_bias,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share,
            },
        }  # fmt: skip

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return hybrid_weights(a)

    def states(self, a: Architecture, kind: str) -> tuple[RowState, ...]:
        """See `Family.states`."""
        return delta_states(a) if kind == LINEAR else ()

    def drawn(self, a: Architecture) -> int:
        """See `Family.drawn`: `A_log`, in fp32."""
        return a.linear.value_heads * DTYPE_BYTES["float32"]

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        if forward.kind == LINEAR:
            return gated_delta_net(forward, weights, x)
        return gated_output_attention(forward, weights, x, turn)


families.register("qwen3_5_text")(Qwen35Text())
