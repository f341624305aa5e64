"""OLMo 3 (2512.13961; Hugging Face's `olmo3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import (
    rotate_wide,
    whole_norm_attention,
    wide_norm,
    wide_rotation,
)
from memfit.families.shared.config import (
    cycle,
    flag,
    layer_types_config,
    pattern_of_windows,
    read_decoder,
    rope_by_kind,
    size,
)
from memfit.families.shared.forward import Forward, Rotation, Weights
from memfit.families.shared.gated import PostNormFamily, by_name, kinds
from memfit.families.shared.weights import (
    gated_config,
    post_norm_weights,
    rotary_buffers,
    whole_norm_rows,
)
from memfit.meta import Tensor
from memfit.records.model import SLIDING, Architecture, TensorSpec, Weight


@final
class Olmo3(PostNormFamily):
    """OLMo 2's block; three of four look back over a window, and rotate by angles of their own."""

    name = "olmo3"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    rotates_by_kind = True
    norm = staticmethod(by_name(wide_norm))
    rotation = staticmethod(wide_rotation)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Olmo3Config`."""
        rope_by_kind(config)
        a = read_decoder(config, self.name, positions=2048, rotation="read")
        bias = flag(config, "attention_bias", False)
        pattern = pattern_of_windows(config, a.layers, 4, key="")
        return replace(
            a,
            attention_bias=bias,
            output_bias=bias,
            qk_norm=True,
            sliding_window=size(config, "sliding_window", 4096) if SLIDING in pattern else 0,
            layer_kinds=cycle(pattern),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "sliding_window": a.sliding_window or None,
            "layer_types": layer_types_config(a),
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return post_norm_weights(a, whole_norm_rows(a))

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`; frequencies of each kind of block."""
        return rotary_buffers(a) * len(kinds(a))

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return whole_norm_attention(forward, weights, x, turn, wide_norm, rotate_wide)


families.register("olmo3")(Olmo3())
