"""What a transformer block of Megatron-LM keeps for its backward, and what that adds for a moment.

Source: megatron/core/transformer (attention, mlp, moe, multi_latent_attention), Transformer
Engine's LayerNormLinear, Linear, GroupedLinear and DotProductAttention, and Korthikanti et al.
2205.05198, whose 34 sbh + 5 as^2b of a block these sums give for GPT with dropout.
"""

from __future__ import annotations

from typing import Literal

from memfit.plan.frameworks.megatron.shape import Shape
from memfit.plan.step_time.arrays import larger, rounded, where
from memfit.records import Record

FLOAT = 4  # bytes: statistics, log-sum-exp and routing are fp32 in any precision


# Transformer Engine's; Megatron's own; those of before megatron-core, with unfused RMSNorm and
# SwiGLU and repeated keys
Layers = Literal["transformer_engine", "local", "legacy"]


class Adapters(Record, frozen=True, kw_only=True):
    """The adapters of a block whose other weights are frozen."""

    linears: frozenset[str]
    rank: int
    dropout: bool


class BlockSettings(Record, frozen=True, kw_only=True):
    """How a block is computed."""

    layers: Layers
    attention: str  # eager | flash | cudnn
    scatters_heads: bool  # --cp-comm-type a2a: cp ranks exchange tokens for heads, and back
    hidden_dropout: bool
    attention_dropout: bool
    fused_softmax: bool  # one kernel scales, masks and normalises the scores
    recomputed: frozenset[str]  # modules of --recompute-modules; empty where none are
    adapters: Adapters | None  # None: all weights are trained
    fp8: bool  # linears read FP8, and keep their inputs in it
    fp8_attention: bool  # --fp8-dot-product-attention
    fp8_activation: bool  # --activation-func-fp8-input-store
    imbalance: float  # tokens of the fullest rank's experts over the mean
    fuses_wgrad: bool  # --gradient-accumulation-fusion: a weight's gradient goes to its buffer

    @property
    def engine(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.layers == "transformer_engine"


Parts = dict[str, int]


def save_block(shape: Shape, settings: BlockSettings, *, moe: bool) -> Parts:
    """Bytes that one block keeps of one micro-batch, by what they are."""
    parts = save_norm(shape, settings, "attention", "linear_qkv")
    if shape.attention.latent.kv_rank:
        parts |= _save_latent(shape, settings)
    else:
        parts |= _save_projected(shape, settings)
    parts |= save_core(shape, settings)
    if settings.adapters is not None:
        parts |= _save_adapters(shape, settings.adapters)
    if settings.hidden_dropout:
        parts["dropout masks"] = 2 * shape.own_tokens * shape.hidden
    parts |= save_norm(shape, settings, "feed-forward", "linear_fc1")
    parts |= save_experts(shape, settings) if moe else save_dense(shape, settings)
    return parts


def save_norm(shape: Shape, settings: BlockSettings, of: str, linear: str) -> Parts:
    """The norm's input (the residual stream), its statistics, and its output for the linear.

    A frozen linear needs no input; its adapter keeps one of its own.
    """
    statistics = shape.norm * FLOAT * shape.own_tokens
    parts = {f"{of} norm's input": shape.stream + statistics}
    if settings.layers == "legacy" and shape.norm == 1:
        # an fp32 copy of the input instead, and the product that the weight multiplies
        copy = FLOAT * shape.own_tokens * shape.hidden
        parts = {f"{of} norm's input": copy + statistics, f"{of} norm's product": shape.stream}
    if "layernorm" not in settings.recomputed and _learns(settings, linear):
        parts[f"{of} norm's output"] = _input(shape, settings) * shape.own_tokens * shape.hidden
    return parts


def _input(shape: Shape, settings: BlockSettings) -> int:
    """Bytes of an element that a linear keeps of its input; an adapter keeps its own in 16 bits."""
    return 1 if settings.fp8 and settings.adapters is None else shape.element


def _learns(settings: BlockSettings, linear: str) -> bool:
    """Whether a linear, or an adapter without dropout beside it, needs the linear's input."""
    if settings.adapters is None:
        return True
    return linear in settings.adapters.linears and not settings.adapters.dropout


def _save_adapters(shape: Shape, adapters: Adapters) -> Parts:
    """Low-rank products, and where there is dropout the inputs behind it with their masks."""
    ffn = shape.tokens * shape.ffn // shape.mesh.tp
    inputs = {
        "linear_qkv": shape.own_tokens * shape.hidden,
        "linear_proj": shape.tokens * shape.attention.query // shape.mesh.tp,
        "linear_fc1": shape.own_tokens * shape.hidden,
        "linear_fc2": ffn,
    }
    total = shape.element * shape.tokens * adapters.rank * len(adapters.linears)
    if adapters.dropout:
        total += (shape.element + 1) * sum(inputs[linear] for linear in adapters.linears)
    return {"adapters": total}


def _save_projected(shape: Shape, settings: BlockSettings) -> Parts:
    """Queries, keys and values, after rotation where there is one."""
    wide = (
        3 * shape.attention.query
        if settings.layers == "legacy"
        else shape.attention.query + 2 * shape.attention.keys
    )
    normed = (
        shape.attention.query + shape.attention.keys if shape.attention.qk_norm else 0
    )  # the norms' inputs, made contiguous
    e = 1 if settings.fp8_attention else shape.element
    return {
        "query, key, value": shape.tokens * (e * wide + shape.element * normed) // shape.mesh.tp,
    }


def _save_latent(shape: Shape, settings: BlockSettings) -> Parts:
    """Compressed queries and keys with their norms' outputs; then heads, rotated and joined."""
    m, tokens, e = shape.attention.latent, shape.tokens, shape.element
    own = shape.own_tokens
    compressed = 2 * (m.query_rank + m.kv_rank) + m.rotated
    wide = shape.attention.heads * (2 * (m.unrotated + m.rotated) + m.value)
    if "mla_up_proj" in settings.recomputed:
        return {"latent": e * own * (m.query_rank + m.kv_rank + m.rotated)}
    return {
        "latent": e * own * compressed + FLOAT * shape.norm * own * 2,
        "query, key, value": e * tokens * wide // shape.mesh.tp,
    }


def save_core(shape: Shape, settings: BlockSettings) -> Parts:
    """The attention kernel's output, which the projection keeps, and what its backward needs."""
    value = (
        shape.attention.heads * shape.attention.latent.value
        if shape.attention.latent.kv_rank
        else shape.attention.query
    )
    # attention in FP8 keeps its output in 16 bits and once: MLCommons' rows say so, with and
    # without an exchange of heads
    out = shape.element * shape.tokens * value // shape.mesh.tp
    parts = {"attention's output": out}
    if settings.fp8 and settings.adapters is None and not settings.fp8_attention:
        parts["attention's output, in FP8 for the projection"] = (
            shape.tokens * value // shape.mesh.tp
        )
    if "core_attn" in settings.recomputed:
        return parts
    if settings.attention == "eager":
        elements = (
            shape.attention.heads
            * shape.tokens
            * shape.rows.sequence
            * shape.mesh.cp
            // shape.mesh.tp
        )
        # the softmax's output, then dropout's mask and output; unfused, the softmax is in fp32 and
        # the product with the values keeps a 16-bit tensor of its own
        each = shape.element if settings.fused_softmax else FLOAT
        if settings.attention_dropout:
            each += 1 + shape.element
        elif not settings.fused_softmax and shape.element < FLOAT:
            each += shape.element
        parts["probabilities"] = elements * each
        return parts
    parts["log-sum-exp"] = FLOAT * shape.tokens * shape.attention.heads // shape.mesh.tp
    exchanges = settings.scatters_heads and not settings.fp8_attention
    if settings.attention == "flash" or exchanges:
        copied = out if settings.attention == "flash" else where(shape.mesh.cp > 1, out, 0)
        parts["attention's output, as the kernel laid it out"] = copied
    return parts


def save_dense(shape: Shape, settings: BlockSettings) -> Parts:
    """Both linears' inputs between which the activation stands."""
    if "mlp" in settings.recomputed:
        return {}
    elements = shape.tokens * shape.ffn // shape.mesh.tp
    e = 1 if settings.fp8_activation else shape.element
    parts = {"feed-forward, first linear": e * shape.widen * elements}
    if settings.layers == "legacy" and shape.widen == 2:
        parts["feed-forward, gate"] = shape.element * elements
    if _learns(settings, "linear_fc2"):
        parts["feed-forward, activation"] = _input(shape, settings) * elements
    return parts


def routed_tokens(shape: Shape, settings: BlockSettings) -> int:
    """Token copies that the experts of one rank receive, of one micro-batch."""
    copies = shape.own_tokens * shape.experts.per_token * shape.mesh.etp
    return rounded(copies * settings.imbalance)  # type: ignore[no-any-return]


def save_experts(shape: Shape, settings: BlockSettings) -> Parts:
    """The router's scores, the tokens in the experts' order, and both grouped linears' inputs."""
    if "moe" in settings.recomputed:
        return {}
    e, x = shape.element, shape.experts
    routed = routed_tokens(shape, settings)
    width = e * routed * x.ffn // shape.mesh.etp
    # logits, scores and the mask of choices: 4 + 4 + 1 bytes an expert
    parts = {"router": shape.own_tokens * x.count * (2 * FLOAT + 1)}
    parts["experts, tokens"] = e * routed * shape.hidden
    parts["experts, first linear"] = shape.widen * width
    if "moe_act" not in settings.recomputed:
        # a gated activation weighs its output by the router's scores in the same kernel; any other
        # one is weighed by a product, which keeps the activation beside what the linear keeps
        parts["experts, activation"] = width if shape.widen == 2 else 2 * width
    if x.shared_ffn and "shared_experts" not in settings.recomputed:
        shared = e * shape.tokens * x.shared_ffn // shape.mesh.tp
        parts["shared expert"] = (shape.widen + 1) * shared
    return parts


def backward_extra(shape: Shape, settings: BlockSettings, *, moe: bool) -> int:
    """Return the most bytes that a block's backward holds beyond what its forward saved.

    In the feed-forward: the stream's gradient and that of the first linear's output, when the
    activation's backward has run. In eager attention: two gradients of the scores, when the
    feed-forward's tensors are gone already.
    """
    e = shape.element
    if moe:
        routed = routed_tokens(shape, settings)
        inside = e * routed * (shape.widen * shape.experts.ffn // shape.mesh.etp + shape.hidden)
        freed = sum(save_experts(shape, settings).values())
    else:
        inside = e * shape.tokens * shape.widen * shape.ffn // shape.mesh.tp
        inside += where(shape.mesh.sp, e * shape.tokens * shape.hidden, 0)
        freed = sum(save_dense(shape, settings).values())
    if not settings.fuses_wgrad:
        inside += e * shape.widen * shape.hidden * shape.ffn // shape.mesh.tp
    most = inside
    if settings.attention == "eager":
        scores = (
            e
            * shape.attention.heads
            * shape.tokens
            * shape.rows.sequence
            * shape.mesh.cp
            // shape.mesh.tp
        )
        most = larger(most, 2 * scores - freed)
    return shape.stream + most
