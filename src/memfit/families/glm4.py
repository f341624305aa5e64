"""GLM-4 of 2025, dense (2406.12793; Hugging Face's `glm4`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.blocks import (
    fused_gated_mlp,
    plain_attention,
    repeat_pairs,
    swap_neighbours,
)
from memfit.families.shared.config import flag, fraction_of, read_decoder
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    cut_head,
)
from memfit.families.shared.gated import SandwichFamily
from memfit.families.shared.weights import decoder, gated_config, linear, projection_rows
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight

NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@final
class Glm4(SandwichFamily):
    """Norms before and after attention and feed-forward; pairs of neighbours are rotated."""

    name = "glm4"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    norms = NORMS

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Glm4Config`."""
        a = read_decoder(
            config, self.name, kv_heads=2, head_dim=128, positions=131072, rotation=0.5
        )
        return replace(a, attention_bias=flag(config, "attention_bias", True))

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "partial_rotary_factor": fraction_of(a.rotary_dim, a.head_dim),
            "pad_token_id": None,  # the class's own is larger than a small vocabulary
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = projection_rows(a)
        rows += linear("mlp.gate_up_proj", 2 * a.ffn, a.hidden, False)
        rows += linear("mlp.down_proj", a.hidden, a.ffn, False)
        order = (NORMS[0], NORMS[2], NORMS[1], NORMS[3])
        return decoder(a, rows + [(f"{name}.weight", (a.hidden,)) for name in order])

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return plain_attention(forward, weights, x, turn, _rotate)

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        return fused_gated_mlp(forward, weights, x)


def _rotate(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Neighbours are pairs, so each block writes cosines and sines out twice for itself."""
    cos, sin = meta.unsqueeze(turn[0], 1), meta.unsqueeze(turn[1], 1)
    cos = repeat_pairs(cos)
    sin = repeat_pairs(sin)
    size = cos.shape[-1]
    query_part, query_rest = cut_head(query, size)
    key_part, key_rest = cut_head(key, size)
    query_rotated = _turn(query_part, cos, sin)
    key_rotated = _turn(key_part, cos, sin)
    query_rotated = meta.concatenate((query_rotated, query_rest), 3)
    key_rotated = meta.concatenate((key_rotated, key_rest), 3)
    return query_rotated, key_rotated


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return meta.add(meta.mul(x, cos), meta.mul(swap_neighbours(x), sin))


families.register("glm4")(Glm4())
