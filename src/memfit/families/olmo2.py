"""OLMo 2 (2501.00656; Hugging Face's `olmo2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import Family, families
from memfit.families.shared.blocks import (
    post_norm_block,
    rotate_wide,
    whole_norm_attention,
    wide_norm,
)
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Weights,
    embedding,
    positions,
    rotation,
)
from memfit.families.shared.weights import gated_config, post_norm_weights, whole_norm_rows
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Olmo2(Family):
    """Norms after attention and feed-forward, and over all heads of query and key together."""

    name = "olmo2"
    lean = True
    norm_after_blocks = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

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

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`; cosines and sines stay in fp32."""
        x = embedding(forward, weights["embed_tokens.weight"], forward.input_ids)
        position_ids = positions(forward)
        cosines, sines = rotation(forward, "float32", position_ids)
        return Embedded(x, (cosines, sines, position_ids), (x,))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        turn = shared[0], shared[1]

        def attention(x: Tensor) -> Tensor:
            return whole_norm_attention(forward, weights, x, turn, wide_norm, rotate_wide)

        return post_norm_block(forward, weights, x, attention, wide_norm)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Family.finish`."""
        return wide_norm(forward, weights["norm.weight"], x, feeds=False)


families.register("olmo2")(Olmo2())
