"""Decoders of linear attention and attention in turn: Qwen3.5, Qwen3-Next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec.structs import replace

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import show
from memfit.families.shared.blocks import unit_norm
from memfit.families.shared.config import cycle, flag, fraction_of, read_decoder, refuse, size
from memfit.families.shared.experts import (
    gated_expert_config,
    gated_expert_rows,
    sparse_and_gated,
)
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    attend,
    heads,
    keep,
    module,
    project,
    rotate_part,
)
from memfit.families.shared.gated import Decoder, by_name
from memfit.families.shared.hybrid.delta_rule import GATES, NAME, gated_delta_net
from memfit.families.shared.weights import Rows, gated_config, head, linear, norm_rows
from memfit.meta import Tensor
from memfit.meta.elementwise import sigmoid
from memfit.records.model import DTYPE_BYTES, LINEAR, Architecture, Linear, RowState, Weight

# joined with the new token, of which the slot is copied and the convolution reads
CONV_PASSES = 5
# decayed (2), read by the key (3), the key's product (1) added (3), read by the query (3), kept (2)
STATE_PASSES = 14
KINDS = {"linear_attention": LINEAR, "full_attention": ""}  # by their names in `layer_types`


class HybridDecoder(Decoder):
    """Linear attention in most blocks, and attention with an output gate in the others.

    Abstract, as `Family` is: a family implements it once and is final.
    """

    lora_targets = ("q_proj", "v_proj", "in_proj_qkv")
    dropouts = ("attention_dropout",)
    unread = ("mtp.",)  # layers that predict further tokens
    state_gates: ClassVar[tuple[str, ...]] = GATES
    norm = staticmethod(by_name(unit_norm))
    # a block's module of linear attention
    linear_attention: ClassVar[staticmethod[[Forward, Weights, Tensor], Tensor]] = staticmethod(
        gated_delta_net
    )

    @abstractmethod
    def feed_forward_rows(self, a: Architecture) -> Rows:
        """The weights of one block's feed-forward, in the order of Hugging Face's class."""

    def linear_rows(self, a: Architecture) -> Rows:
        """The weights of linear attention of one block."""
        return delta_rows(a)

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
        rest = self.feed_forward_rows(a) + norm_rows(a)
        rows = {LINEAR: self.linear_rows(a) + rest, "": gated_output_rows(a) + rest}
        blocks = [
            Weight(name=f"model.layers.{layer}.{name}", shape=shape, part="block", layer=layer)
            for layer in range(a.layers)
            for name, shape in rows[a.kind(layer)]
        ]
        return (
            Weight(name="model.embed_tokens.weight", shape=(a.vocab, a.hidden), part="embedding"),
            *blocks,
            Weight(name="model.norm.weight", shape=(a.hidden,), part="norm"),
            *head(a),
        )

    def states(self, a: Architecture, kind: str) -> tuple[RowState, ...]:
        """See `Family.states`."""
        return delta_states(a) if kind == LINEAR else ()

    def drawn(self, a: Architecture) -> int:
        """See `Family.drawn`: `A_log`, in fp32."""
        return a.linear.value_heads * DTYPE_BYTES["float32"]

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        if forward.kind == LINEAR:
            return self.linear_attention(forward, weights, x)
        return gated_output_attention(forward, weights, x, turn)


class HybridMixture(HybridDecoder):
    """The same with many small experts in each block, and a shared one that is gated.

    Memory does not depend on which experts are chosen. The router's auxiliary loss is not part of
    memfit's step: a config that asks for it is refused.
    """

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return super().config(a) | gated_expert_config(a)

    def feed_forward_rows(self, a: Architecture) -> Rows:
        """See `HybridDecoder.feed_forward_rows`."""
        return gated_expert_rows(a)

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        return sparse_and_gated(forward, weights, x)


def read_hybrid(
    config: Mapping[str, Any], family: str, *, kv_heads: int, ffn: int | None = None
) -> Architecture:
    """What such decoders' config.json names alike; see `read_decoder` for the keywords.

    Raises InvalidRequest as `read_decoder` and `_read_linear` do.
    """
    a = read_decoder(
        config, family, kv_heads=kv_heads, head_dim=256, positions=32768, rotation=0.25, ffn=ffn
    )
    bias = flag(config, "attention_bias", False)
    refuse(config, "attn_output_gate", (None, True))
    sizes, kinds = _read_linear(config, a.layers)
    return replace(
        a, attention_bias=bias, output_bias=bias, qk_norm=True, output_gate=True, linear=sizes,
        layer_kinds=kinds,
    )  # fmt: skip


def _read_linear(config: Mapping[str, Any], layers: int) -> tuple[Linear, tuple[str, ...]]:
    """The sizes of linear attention, and the blocks' kinds.

    Raises InvalidRequest: kinds that are neither of the two, or not one a layer.
    """
    found = Linear(
        key_heads=size(config, "linear_num_key_heads", 16),
        value_heads=size(config, "linear_num_value_heads", 32),
        key=size(config, "linear_key_head_dim", 128),
        value=size(config, "linear_value_head_dim", 128),
        kernel=size(config, "linear_conv_kernel_dim", 4),
    )
    if found.value_heads % found.key_heads:
        raise InvalidRequest(
            f"config.json: `linear_num_key_heads: {found.key_heads}` do not divide"
            f" `linear_num_value_heads: {found.value_heads}`"
        )
    kinds = config.get("layer_types")
    if kinds is None:
        every = size(config, "full_attention_interval", 4)
        return found, cycle([LINEAR if (at + 1) % every else "" for at in range(layers)])
    known = isinstance(kinds, list | tuple) and all(k in KINDS for k in kinds)
    if not known or len(kinds) != layers:
        raise InvalidRequest(
            f"`layer_types: {show(kinds)}` in config.json is not one of {', '.join(KINDS)} for each"
            f" of {layers} layers"
        )
    return found, cycle([KINDS[kind] for kind in kinds])


def hybrid_config(a: Architecture) -> dict[str, Any]:
    """The keys that `_read_linear` reads."""
    names = {kind: name for name, kind in KINDS.items()}
    return {
        "linear_num_key_heads": a.linear.key_heads,
        "linear_num_value_heads": a.linear.value_heads,
        "linear_key_head_dim": a.linear.key,
        "linear_value_head_dim": a.linear.value,
        "linear_conv_kernel_dim": a.linear.kernel,
        "layer_types": [names[a.kind(layer)] for layer in range(a.layers)],
    }


def delta_rows(a: Architecture) -> Rows:
    """Linear attention of one block of `Qwen3_5GatedDeltaNet`."""
    sizes, values = a.linear, a.linear.value_heads * a.linear.value
    rows: Rows = [
        (f"{NAME}.dt_bias", (sizes.value_heads,)),
        (f"{NAME}.A_log", (sizes.value_heads,)),
        (f"{NAME}.conv1d.weight", (sizes.channels, 1, sizes.kernel)),
        (f"{NAME}.norm.weight", (sizes.value,)),
    ]
    rows += linear(f"{NAME}.out_proj", a.hidden, values, bias=False)
    rows += linear(f"{NAME}.in_proj_qkv", sizes.channels, a.hidden, bias=False)
    rows += linear(f"{NAME}.in_proj_z", values, a.hidden, bias=False)
    rows += linear(f"{NAME}.in_proj_b", sizes.value_heads, a.hidden, bias=False)
    return rows + linear(f"{NAME}.in_proj_a", sizes.value_heads, a.hidden, bias=False)


def joined_delta_rows(a: Architecture) -> Rows:
    """Linear attention of one block of `Qwen3NextGatedDeltaNet`."""
    sizes, values = a.linear, a.linear.value_heads * a.linear.value
    rows: Rows = [
        (f"{NAME}.dt_bias", (sizes.value_heads,)),
        (f"{NAME}.A_log", (sizes.value_heads,)),
        (f"{NAME}.conv1d.weight", (sizes.channels, 1, sizes.kernel)),
    ]
    rows += linear(f"{NAME}.in_proj_qkvz", sizes.channels + values, a.hidden, bias=False)
    rows += linear(f"{NAME}.in_proj_ba", 2 * sizes.value_heads, a.hidden, bias=False)
    rows.append((f"{NAME}.norm.weight", (sizes.value,)))
    return rows + linear(f"{NAME}.out_proj", a.hidden, values, bias=False)


def delta_states(a: Architecture) -> tuple[RowState, ...]:
    """What linear attention of one block carries along a row, as Hugging Face's cache keeps it.

    passes: of `causal_conv1d_update` and `torch_recurrent_gated_delta_rule`, operation by
    operation, and of writing the slot.
    """
    sizes = a.linear
    return (
        RowState(name="conv", shape=(sizes.channels, sizes.kernel), passes=CONV_PASSES),
        RowState(
            name="recurrent", shape=(sizes.value_heads, sizes.key, sizes.value), dtype="float32",
            passes=STATE_PASSES,
        ),
    )  # fmt: skip


def gated_output_rows(a: Architecture) -> Rows:
    """Attention whose queries' product makes its output's gate, too."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = linear("self_attn.q_proj", 2 * q, a.hidden, a.attention_bias)
    rows += linear("self_attn.k_proj", kv, a.hidden, a.attention_bias)
    rows += linear("self_attn.v_proj", kv, a.hidden, a.attention_bias)
    rows += linear("self_attn.o_proj", a.hidden, q, a.output_bias)
    norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    return rows + [(name, (a.head_dim,)) for name in norms]


@module
def gated_output_attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """Attention with norms over heads, whose result is multiplied by a gate's sigmoid."""
    size = forward.architecture.head_dim
    shape = (*x.shape[:-1], -1, size)
    both = meta.view(project(forward, weights, "self_attn.q_proj", x), *x.shape[:-1], -1, 2 * size)
    query, gate = meta.split(both, (size, size), 3)
    del both
    gate = meta.reshape(gate, *x.shape[:-1], -1)
    query = unit_norm(forward, weights["self_attn.q_norm.weight"], query, False)
    query = meta.transpose(query, 1, 2)
    key = meta.view(project(forward, weights, "self_attn.k_proj", x), *shape)
    key = unit_norm(forward, weights["self_attn.k_norm.weight"], key, False)
    key = meta.transpose(key, 1, 2)
    value = heads(forward, weights, "self_attn.v_proj", x, shape)
    query, key = rotate_part(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = meta.mul(out, sigmoid(gate))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


@module
def grid_rotation(forward: Forward, dtype: str, position_ids: Tensor) -> Rotation:
    """Cosines and sines (batch, tokens, rotary_dim) of three grids of positions, alike in text."""
    meter, half = forward.meter, forward.architecture.rotary_dim // 2
    rows, tokens = forward.batch, position_ids.shape[1]
    wide = meta.empty(meter, (3, rows, tokens, 1), "float32")
    frequencies = meta.empty(meter, (3, rows, tokens, half), "float32")
    del wide
    cosines = meta.scale(meta.empty(meter, frequencies.shape, "float32"))
    sines = meta.scale(meta.empty(meter, frequencies.shape, "float32"))
    sines = meta.empty(meter, (rows, tokens, 2 * half), "float32")  # the three joined in the first
    cosines = meta.empty(meter, (rows, tokens, 2 * half), "float32")
    result = meta.cast(cosines, dtype), meta.cast(sines, dtype)
    del frequencies
    return result
