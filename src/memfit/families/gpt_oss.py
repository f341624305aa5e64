"""gpt-oss (OpenAI 2025, 2508.10925; Hugging Face's `gpt_oss`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.blocks import wide_norm
from memfit.families.shared.config import flag, read_decoder, refuse, rope, size
from memfit.families.shared.experts import Routed, read_experts, run_experts
from memfit.families.shared.forward import Forward, Weights, heads, keep, module, project
from memfit.families.shared.gated import Decoder, by_name
from memfit.families.shared.weights import Rows, decoder, gated_config, linear
from memfit.meta import Tensor
from memfit.meta.attending.sinks import attend_beside_sinks, attend_with_sinks
from memfit.meta.attending.slots import Decode, attend_slots
from memfit.meta.elementwise import sigmoid
from memfit.meta.layers import routing
from memfit.records.model import SLIDING, Architecture, Weight


@module
def half_rotation(forward: Forward, dtype: str, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (batch or 1, tokens, head_dim / 2), without a gradient."""
    meter, half = forward.meter, forward.architecture.rotary_dim // 2
    wide = meta.empty(meter, (*position_ids.shape, 1), "float32")
    angles = meta.empty(meter, (*position_ids.shape, half), "float32")
    del wide
    cosines, sines = _scaled(angles), _scaled(angles)
    return meta.cast(cosines, dtype), meta.cast(sines, dtype)


@final
class GptOss(Decoder):
    """Attention with sinks, every other layer within a window; experts with biases."""

    name = "gpt_oss"
    windows = True
    attention_class = AttentionClass(only_eager=True)
    packed_as = ("mxfp4",)
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    norm = staticmethod(by_name(wide_norm))
    rotation = staticmethod(half_rotation)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `GptOssConfig`."""
        refuse(config, "hidden_act", ("silu",))  # the class has its own activation, never this
        a = read_decoder({"head_dim": 64, **config}, self.name, kv_heads=8, positions=131072)
        rope(config)
        if a.head_dim % 2:
            raise InvalidRequest(f"config.json: heads of {a.head_dim} elements cannot be rotated")
        experts = read_experts(
            config,
            count=("num_local_experts", 128),
            per_token=("num_experts_per_tok", 4),
            ffn=("intermediate_size", a.ffn),
            normalised=False,
        )
        bias = flag(config, "attention_bias", True)
        return replace(
            a,
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=True,
            sliding_window=_window(config, a.layers),
            layer_kinds=(SLIDING, ""),
            experts=experts,
            sinks=True,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        common = gated_config(a)
        del common["hidden_act"]
        return common | {
            "attention_bias": a.attention_bias,
            "num_local_experts": a.experts.count,
            "num_experts_per_tok": a.experts.per_token,
            "sliding_window": a.sliding_window,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return decoder(a, _block(a))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = wide_norm(forward, weights["input_layernorm.weight"], x)
        x = _attention(forward, weights, x, shared)
        x = meta.add(residual, x)
        residual = x
        x = wide_norm(forward, weights["post_attention_layernorm.weight"], x)
        x, shares = _feed_forward(forward, weights, x)
        x = meta.add(residual, x)
        del shares  # alive until here
        return x


def _window(config: Mapping[str, Any], layers: int) -> int:
    """The window of the even layers; refuses any other order of windows."""
    kinds = config.get("layer_types")
    usual = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if kinds is not None and kinds != usual:
        raise InvalidRequest(
            "`layer_types` in config.json is not `sliding_attention` and `full_attention` in turn",
            hint="memfit refuses what it would have to guess",
        )
    return size(config, "sliding_window", 128)


def _block(a: Architecture) -> Rows:
    query, kv, experts = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.experts
    rows: Rows = [("self_attn.sinks", (a.heads,))]
    rows += linear("self_attn.q_proj", query, a.hidden, a.attention_bias)
    rows += linear("self_attn.k_proj", kv, a.hidden, a.attention_bias)
    rows += linear("self_attn.v_proj", kv, a.hidden, a.attention_bias)
    rows += linear("self_attn.o_proj", a.hidden, query, a.output_bias)
    rows += linear("mlp.router", experts.count, a.hidden, bias=True)
    both = 2 * experts.ffn  # gate and up take turns: elements 0, 2, … are the gate's
    rows += [("mlp.experts.gate_up_proj", (experts.count, a.hidden, both))]
    rows += [("mlp.experts.gate_up_proj_bias", (experts.count, both))]
    rows += [("mlp.experts.down_proj", (experts.count, experts.ffn, a.hidden))]
    rows += [("mlp.experts.down_proj_bias", (experts.count, a.hidden))]
    rows += [("input_layernorm.weight", (a.hidden,))]
    rows += [("post_attention_layernorm.weight", (a.hidden,))]
    return rows


def _scaled(angles: Tensor) -> Tensor:
    """`angles.cos() * attention_scaling`."""
    plain = meta.empty(angles.meter, angles.shape, "float32")
    scaled = meta.empty(angles.meter, angles.shape, "float32")
    del plain
    return scaled


def _attend(forward: Forward, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """(batch, heads, tokens, size) -> the same."""
    call = partial(attend_with_sinks, sinks=sinks)
    masks = forward.masks
    mask = None if masks is None else masks.of(forward.architecture, forward.kind)
    if mask is not None:
        return attend_beside_sinks(query, key, value, sinks, mask)
    if forward.documents is None:
        return call(query, key, value)
    return meta.by_document(call, query, key, value, forward.documents)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
    """Grouped heads; whatever the window, one mask of booleans is made in each call."""
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = heads(forward, weights, "self_attn.q_proj", x, shape)
    key = heads(forward, weights, "self_attn.k_proj", x, shape)
    value = heads(forward, weights, "self_attn.v_proj", x, shape)
    cos, sin = meta.unsqueeze(shared[0], 1), meta.unsqueeze(shared[1], 1)
    query, key = _turn(query, cos, sin), _turn(key, cos, sin)
    key, value = keep(forward, key, value)
    sinks = weights["self_attn.sinks"]
    if isinstance(forward.slots, Decode):
        out = attend_slots(forward.slots, query, key, value, sinks=sinks)
    else:
        out = _attend(forward, query, key, value, sinks)
        out = meta.transpose(out, 1, 2)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = meta.split(x, (half, half), 3)
    turned_first = meta.subtract(meta.mul(first, cos), meta.mul(second, sin))
    turned_second = meta.add(meta.mul(second, cos), meta.mul(first, sin))
    return meta.concatenate((turned_first, turned_second), 3)


@module
def _feed_forward(forward: Forward, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, tokens, hidden) -> the same, and what each chosen expert counts for."""
    shape = x.shape
    x = meta.reshape(x, -1, shape[-1])
    logits, shares, chosen = _route(forward, weights, x)
    x = run_experts(forward, weights, x, chosen, shares, _gate)
    x = meta.reshape(x, *shape)
    del logits  # alive until here
    return x, shares


@module
def _route(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """The best experts, and a softmax over their logits alone."""
    logits = meta.linear(x, weights["mlp.router.weight"], weights["mlp.router.bias"])
    best, chosen = routing.top_k(logits, forward.architecture.experts.per_token)
    return logits, meta.softmax(best), chosen


def _gate(forward: Forward, x: Tensor) -> Tensor:
    """A clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate)."""
    del forward
    gate, up = meta.every_other(x), meta.every_other(x)
    gate = meta.clamp(gate, 1)
    up = meta.clamp(up, 2)
    glu = meta.mul(gate, sigmoid(meta.scale(gate)))
    return meta.mul(meta.shift(up), glu)


families.register("gpt_oss")(GptOss())
