"""OLMo 2 (2501.00656; Hugging Face's `olmo2`)."""

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
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.forward import Forward, Rotation, Weights
from memfit.families.shared.gated import PostNormFamily, by_name
from memfit.families.shared.weights import gated_config, post_norm_weights, whole_norm_rows
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Olmo2(PostNormFamily):
    """Norms after attention and feed-forward, and over all heads of query and key together."""

    name = "olmo2"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    rotation = staticmethod(wide_rotation)
    norm = staticmethod(by_name(wide_norm))

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Olmo2Config`."""
        a = read_decoder(config, self.name, positions=2048)
        bias = flag(config, "attention_bias", False)
        return replace(a, attention_bias=bias, output_bias=bias, qk_norm=True)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {"attention_bias": a.attention_bias}

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return post_norm_weights(a, whole_norm_rows(a))

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return whole_norm_attention(forward, weights, x, turn, wide_norm, rotate_wide)


families.register("olmo2")(Olmo2())
