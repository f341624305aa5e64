"""Multi-head latent attention over `memfit.meta` (DeepSeek-V2, 2405.04434, section 2.1).

Written as Hugging Face's modules are; see `families/shared/forward.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from memfit import meta
from memfit.families.shared.experts import Routed, sparse_and_shared
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    attend,
    gated_mlp,
    keep,
    module,
    project,
    rms_norm,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.latent import latent_weights
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight

# query and shared key, both (batch, heads, tokens, rotated) -> the same, rotated
Rotate = Callable[[Tensor, Tensor, Rotation], tuple[Tensor, Tensor]]


def rotate_pairs(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's: elements 2i and 2i + 1 of a head are rotated together."""
    cos, sin = _angles(turn[0]), _angles(turn[1])
    query_even, query_odd = meta.every_other(query), meta.every_other(query)
    key_even, key_odd = meta.every_other(key), meta.every_other(key)
    query_rotated = _turn_pairs(query_even, query_odd, cos, sin)
    key_rotated = _turn_pairs(key_even, key_odd, cos, sin)
    return query_rotated, key_rotated


def _angles(x: Tensor) -> Tensor:
    """(batch, tokens, rotated), which holds everything twice -> (batch, 1, tokens, rotated / 2)."""
    return meta.unsqueeze(meta.narrow(x, 2, 0, x.shape[-1] // 2), 1)


def _turn_pairs(even: Tensor, odd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first = meta.subtract(meta.mul(even, cos), meta.mul(odd, sin))
    second = meta.add(meta.mul(odd, cos), meta.mul(even, sin))
    return meta.concatenate((first, second), 3)


@module
def complex_rotation(forward: Forward, position_ids: Tensor) -> Tensor:
    """DeepSeek-V2's angles (batch or 1, tokens, rotated / 2), complex, without a gradient."""
    meter, half = forward.meter, forward.architecture.rotary_dim // 2
    rows, tokens = position_ids.shape
    wide = meta.empty(meter, (rows, tokens, 1), "float32")
    frequencies = meta.empty(meter, (rows, tokens, half), "float32")
    del wide
    ones = meta.empty(meter, frequencies.shape, "float32")
    angles = meta.empty(meter, frequencies.shape, "complex64")
    del ones
    scaled = meta.empty(meter, frequencies.shape, "complex64")
    del angles
    return scaled


def rotate_complex(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2's: the same pairs, as complex numbers in fp32."""
    query_pairs, key_pairs = _pairs(query), _pairs(key)
    angles = meta.unsqueeze(turn[0], 1)
    query_rotated = _flat(meta.turn(query_pairs, angles), query)
    key_rotated = _flat(meta.turn(key_pairs, angles), key)
    return query_rotated, key_rotated


def _pairs(x: Tensor) -> Tensor:
    wide = meta.cast(x, "float32")
    return meta.view_as_complex(meta.reshape(wide, *x.shape[:-1], -1, 2))


def _flat(x: Tensor, like: Tensor) -> Tensor:
    flat = meta.reshape(meta.view_as_real(x), *x.shape[:-1], -1)
    return meta.cast(flat, like.dtype)


@module
def latent_attention(
    forward: Forward, weights: Weights, x: Tensor, turn: Rotation, rotate: Rotate
) -> Tensor:
    """Keys and values from one compressed vector a token; one rotated key that heads share."""
    a, (batch, tokens, _) = forward.architecture, x.shape
    latent = a.latent
    query = meta.view(_query(forward, weights, x), batch, tokens, -1, a.head_dim)
    query = meta.transpose(query, 1, 2)
    query_plain, query_turned = meta.split(query, (latent.unrotated, latent.rotated), 3)
    compressed = project(forward, weights, "self_attn.kv_a_proj_with_mqa", x)
    both, key_turned = meta.split(compressed, (latent.kv_rank, latent.rotated), 2)
    both = rms_norm(forward, weights["self_attn.kv_a_layernorm.weight"], both)
    both = meta.view(both, batch, 1, tokens, latent.kv_rank)
    key_turned = meta.view(key_turned, batch, 1, tokens, latent.rotated)
    query_turned, key_turned = rotate(query_turned, key_turned, turn)
    both, key_turned = keep(forward, both, key_turned)
    joined = meta.concatenate((query_plain, query_turned), 3)
    key, value = _expanded(forward, weights, both, key_turned)
    out = attend(forward, joined, key, value)
    out = meta.contiguous(meta.reshape(out, batch, tokens, -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


def _query(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    if not forward.architecture.latent.query_rank:
        return project(forward, weights, "self_attn.q_proj", x)
    low = project(forward, weights, "self_attn.q_a_proj", x)
    low = rms_norm(forward, weights["self_attn.q_a_layernorm.weight"], low)
    return project(forward, weights, "self_attn.q_b_proj", low)


def _expanded(
    forward: Forward, weights: Weights, both: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys (batch, heads, tokens, head_dim), filled part by part, and values."""
    a, (batch, _, tokens, _) = forward.architecture, both.shape
    latent = a.latent
    both = project(forward, weights, "self_attn.kv_b_proj", both)
    both = meta.view(both, batch, tokens, -1, latent.unrotated + latent.value)
    both = meta.transpose(both, 1, 2)
    plain, value = meta.split(both, (latent.unrotated, latent.value), 3)
    turned = meta.expand(turned, batch, a.heads, tokens, latent.rotated)
    key = meta.empty(forward.meter, (batch, a.heads, tokens, a.head_dim), both.dtype)
    key = meta.fill_part(key, plain)
    key = meta.fill_part(key, turned)
    return key, value


class LatentFamily(Decoder):
    """Latent attention, and a feed-forward of experts beside a shared one, or a plain one."""

    rotate: ClassVar[staticmethod[[Tensor, Tensor, Rotation], tuple[Tensor, Tensor]]]
    route: ClassVar[staticmethod[[Forward, Weights, Tensor], Routed]]

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return latent_weights(a)

    def default_targets(self, a: Architecture) -> tuple[str, ...]:
        """See `Family.default_targets`: a query that is not compressed has one projection only."""
        return self.lora_targets if a.latent.query_rank else ("q_proj", *self.lora_targets[1:])

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return latent_attention(forward, weights, x, turn, self.rotate)

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        if "mlp.gate.weight" in weights:
            return sparse_and_shared(forward, weights, x, self.route)
        return gated_mlp(forward, weights, x)
