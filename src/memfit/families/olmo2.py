"""OLMo 2 (2501.00656; Hugging Face's `olmo2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import Family, families
from memfit.families.shared.blocks import wide_norm
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Rotation,
    Weights,
    attend,
    embedding,
    gated_mlp,
    keep,
    module,
    positions,
    project,
    rotate,
    rotation,
)
from memfit.families.shared.weights import decoder, gated_config, gated_rows, projection_rows
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
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        rows = projection_rows(a)
        rows += [("self_attn.q_norm.weight", (q,)), ("self_attn.k_norm.weight", (kv,))]
        rows += gated_rows("mlp", a, a.ffn)
        rows += [("post_attention_layernorm.weight", (a.hidden,))]
        rows += [("post_feedforward_layernorm.weight", (a.hidden,))]
        return decoder(a, rows)

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
        residual = x
        x = _attention(forward, weights, x, (shared[0], shared[1]))
        x = wide_norm(forward, weights["post_attention_layernorm.weight"], x)
        x = meta.add(residual, x)
        residual = x
        x = gated_mlp(forward, weights, x)
        x = wide_norm(forward, weights["post_feedforward_layernorm.weight"], x)
        return meta.add(residual, x)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Family.finish`."""
        return wide_norm(forward, weights["norm.weight"], x, feeds=False)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = project(forward, weights, "self_attn.q_proj", x)
    query = wide_norm(forward, weights["self_attn.q_norm.weight"], query, feeds=False)
    key = project(forward, weights, "self_attn.k_proj", x)
    key = wide_norm(forward, weights["self_attn.k_norm.weight"], key, feeds=False)
    value = project(forward, weights, "self_attn.v_proj", x)
    query = meta.transpose(meta.view(query, *shape), 1, 2)
    key = meta.transpose(meta.view(key, *shape), 1, 2)
    value = meta.transpose(meta.view(value, *shape), 1, 2)
    query, key = _rotate(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


def _rotate(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Rotated in fp32, then cast back."""
    query_rotated, key_rotated = rotate(query, key, turn)
    return meta.cast(query_rotated, query.dtype), meta.cast(key_rotated, key.dtype)


families.register("olmo2")(Olmo2())
