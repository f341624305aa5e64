"""Pieces of gated blocks beside Llama's, over `memfit.meta`, written as those in `forward` are.

Each is one module, or one function, of Hugging Face's classes of the families that it names.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit import meta
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    activate,
    attend,
    cut_head,
    heads,
    keep,
    module,
    project,
    rms_norm,
    rotate,
    rotation,
    turn_part,
    unit_of,
    with_noise,
    within,
)
from memfit.meta import Tensor
from memfit.meta.layers import lean

Rotate = Callable[[Tensor, Tensor, Rotation], tuple[Tensor, Tensor]]
HeadNorm = Callable[[Forward, Tensor, Tensor, bool], Tensor]  # the last: see `lean.rms_norm`

GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def scaled_embedding(forward: Forward, weight: Tensor) -> Tensor:
    """Return rows of the embedding times a factor, a 0-dim tensor in fp32, with NEFTune's noise."""
    return with_noise(forward, _scaled(forward, weight))


@module
def _scaled(forward: Forward, weight: Tensor) -> Tensor:

    def run() -> Tensor:
        rows = meta.gather_rows(weight, forward.input_ids)
        if weight.dtype == "float32":
            return meta.scale(rows)  # by the buffer itself
        return meta.mul(rows, meta.empty(forward.meter, (), weight.dtype))

    return within(unit_of(forward, weight), run)


@module
def unit_norm(forward: Forward, weight: Tensor, x: Tensor, feeds: bool = True) -> Tensor:
    """RMSNorm in fp32 whose weight is stored minus 1 (gemma, gemma2, gemma3_text)."""
    if "norm" in forward.lean:
        return lean.rms_norm(x, weight, lean.normalise_unit, feeds=feeds)
    output = _normalise(meta.cast(x, "float32"))
    output = meta.mul(output, meta.shift(meta.cast(weight, "float32")))
    return meta.cast(output, x.dtype)


def _normalise(x: Tensor) -> Tensor:
    return meta.mul(x, meta.rsqrt(meta.shift(meta.mean_last(meta.power(x)))))


@module
def wide_norm(forward: Forward, weight: Tensor, x: Tensor, feeds: bool = True) -> Tensor:
    """RMSNorm that is cast back after its weight is applied (olmo2, olmo3)."""
    if "norm" in forward.lean:
        return lean.rms_norm(x, weight, lean.normalise_wide, feeds=feeds)
    dtype = x.dtype
    x = meta.cast(x, "float32")
    variance = meta.mean_last(meta.power(x))
    x = meta.mul(x, meta.rsqrt(meta.shift(variance)))
    return meta.cast(meta.mul(weight, x), dtype)


@module
def unbiased_layer_norm(forward: Forward, weight: Tensor, x: Tensor, feeds: bool = True) -> Tensor:
    """LayerNorm without a bias, written out in fp32 (cohere2)."""
    if "norm" in forward.lean:
        return lean.layer_norm(x, weight, None, feeds=feeds)
    dtype = x.dtype
    x = meta.cast(x, "float32")
    mean = meta.mean_last(x)
    variance = meta.mean_last(meta.power(meta.subtract(x, mean)))
    x = meta.mul(meta.subtract(x, mean), meta.rsqrt(meta.shift(variance)))
    x = meta.mul(meta.cast(weight, "float32"), x)
    return meta.cast(x, dtype)


@module
def fused_gated_mlp(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """down(up(x) * act(gate(x))), gate and up in one projection (phi3, glm4)."""
    up = project(forward, weights, "mlp.gate_up_proj", x)
    width = up.shape[-1] // 2
    gate, up = meta.split(up, (width, width), 2)
    if "mlp" in forward.lean:
        return project(forward, weights, "mlp.down_proj", lean.gated_product(gate, up))
    up = meta.mul(up, activate(forward, gate))
    return project(forward, weights, "mlp.down_proj", up)


def rotate_part_by_part(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Rotation of each head's first elements; each is joined with its rest at once (phi3)."""
    cos, sin = meta.unsqueeze(turn[0], 1), meta.unsqueeze(turn[1], 1)
    size = cos.shape[-1]
    query_part, query_rest = cut_head(query, size)
    key_part, key_rest = cut_head(key, size)
    query_joined = meta.concatenate((turn_part(query_part, cos, sin), query_rest), 3)
    key_joined = meta.concatenate((turn_part(key_part, cos, sin), key_rest), 3)
    return query_joined, key_joined


def swap_neighbours(x: Tensor) -> Tensor:
    """(…, size) -> each pair (a, b) as (-b, a) (gptj, glm4, cohere2, ernie4_5)."""
    first, second = meta.every_other(x), meta.every_other(x)
    pairs = (meta.negative(second), first)
    joined = meta.concatenate([meta.view(p, *p.shape, 1) for p in pairs], 4)
    return meta.view(joined, *x.shape)


def wide_rotation(forward: Forward, dtype: str, position_ids: Tensor) -> Rotation:
    """Cosines and sines in fp32, whatever the embeddings are (olmo2, olmo3, ernie4_5)."""
    del dtype
    return rotation(forward, "float32", position_ids)


@module
def plain_attention(
    forward: Forward,
    weights: Weights,
    x: Tensor,
    turn: Rotation,
    rotate: Rotate,
    norms: tuple[str, str] | None = None,
) -> Tensor:
    """Llama's with another rotation (glm4, cohere2, ernie4_5, hunyuan_v1_dense).

    norms: of each head of query and key behind it.
    """
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = heads(forward, weights, "self_attn.q_proj", x, shape)
    key = heads(forward, weights, "self_attn.k_proj", x, shape)
    value = heads(forward, weights, "self_attn.v_proj", x, shape)
    query, key = rotate(query, key, turn)
    if norms is not None:
        query = rms_norm(forward, weights[norms[0]], query, feeds=False)
        key = rms_norm(forward, weights[norms[1]], key, feeds=False)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


@module
def whole_norm_attention(
    forward: Forward,
    weights: Weights,
    x: Tensor,
    turn: Rotation,
    norm: HeadNorm,
    rotate: Rotate,
) -> Tensor:
    """With a norm over all heads of query and key together (olmo2, olmo3, minimax_m2, olmoe)."""
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = project(forward, weights, "self_attn.q_proj", x)
    query = norm(forward, weights["self_attn.q_norm.weight"], query, False)
    key = project(forward, weights, "self_attn.k_proj", x)
    key = norm(forward, weights["self_attn.k_norm.weight"], key, False)
    value = project(forward, weights, "self_attn.v_proj", x)
    query = meta.transpose(meta.view(query, *shape), 1, 2)
    key = meta.transpose(meta.view(key, *shape), 1, 2)
    value = meta.transpose(meta.view(value, *shape), 1, 2)
    query, key = rotate(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


@module
def head_norm_attention(
    forward: Forward,
    weights: Weights,
    x: Tensor,
    turn: Rotation | None,
    norm: HeadNorm,
) -> Tensor:
    """With norms over each head that is transposed already (gemma3_text, exaone4, apertus)."""
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = heads(forward, weights, "self_attn.q_proj", x, shape)
    key = heads(forward, weights, "self_attn.k_proj", x, shape)
    value = heads(forward, weights, "self_attn.v_proj", x, shape)
    query = norm(forward, weights["self_attn.q_norm.weight"], query, False)
    key = norm(forward, weights["self_attn.k_norm.weight"], key, False)
    if turn is not None:
        query, key = rotate(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


def rotate_none(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Heads as they are: positions are seen by the order of keys alone (cohere2's whole rows)."""
    del turn
    return query, key


def rotate_wide(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """By cosines and sines in fp32, cast back (olmo2, olmo3)."""
    query_rotated, key_rotated = rotate(query, key, turn)
    return meta.cast(query_rotated, query.dtype), meta.cast(key_rotated, key.dtype)


def rotate_neighbours_wide(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Pairs of neighbours, heads cast to fp32 first and back (cohere2)."""
    dtype = query.dtype
    query, key = meta.cast(query, "float32"), meta.cast(key, "float32")
    cos, sin = meta.unsqueeze(turn[0], 1), meta.unsqueeze(turn[1], 1)
    query_rotated = meta.add(meta.mul(query, cos), meta.mul(swap_neighbours(query), sin))
    key_rotated = meta.add(meta.mul(key, cos), meta.mul(swap_neighbours(key), sin))
    return meta.cast(query_rotated, dtype), meta.cast(key_rotated, dtype)


def rotate_written_out(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Pairs of neighbours; each block writes the fp32 angles out twice for itself (ernie4_5)."""
    cos, sin = meta.unsqueeze(turn[0], 1), meta.unsqueeze(turn[1], 1)
    cos = repeat_pairs(cos)
    sin = repeat_pairs(sin)
    query_rotated = _turn_wide(query, cos, sin)
    key_rotated = _turn_wide(key, cos, sin)
    return meta.cast(query_rotated, query.dtype), meta.cast(key_rotated, key.dtype)


def _turn_wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first = meta.mul(meta.cast(x, "float32"), cos)
    return meta.add(first, meta.mul(meta.cast(swap_neighbours(x), "float32"), sin))


def repeat_pairs(x: Tensor) -> Tensor:
    """`x[..., :half].repeat_interleave(2, dim=-1)` (glm4, ernie4_5)."""
    return meta.empty(x.meter, x.shape, x.dtype)
