"""litgpt's modules over `memfit.meta`: model.py and lora.py of litgpt 0.5.13, line by line.

As in `families/shared/forward.py`, a local variable here holds what it holds there.
"""

from __future__ import annotations

from typing import Literal

from memfit import meta
from memfit.families.shared.forward import Embedded, Forward, Weights, embedding, module
from memfit.meta import Tensor
from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, upstream
from memfit.meta.layers.dequantised import QUANTISED_DTYPE, Dequantised, quantised_linear
from memfit.meta.losses.cross_entropy import cross_entropy_rows, cross_entropy_sum
from memfit.meta.products import multiply_batched
from memfit.records import Record

CHUNK = 128  # tokens of the chunked head and cross entropy (finetune/lora.py, utils.py)
# Fabric's plugin quantises what it has cast to fp16 (plugins/precision/bitsandbytes.py)
QUANTISED = Dequantised(stored="float16", keeps_input=True)


# LayerNorm, or RMSNorm, which multiplies by its weight in fp32 or (`narrow-rms`) in 16 bits
Norm = Literal["layer", "rms", "narrow-rms"]
# How attention and feed-forward follow each other: one after the other; the same with norms behind
# both, too; side by side with a norm each; side by side behind one norm.
Order = Literal["sequential", "post-norms", "parallel", "parallel-shared-norm"]
# finetune/lora.py chunks head and loss, finetune/full.py the loss alone, and
# extensions/thunder/pretrain.py takes all tokens at once
LossKind = Literal["chunked-head", "chunked", "whole"]


class LitProgram(Record, frozen=True, kw_only=True):
    """The forward of litgpt's GPT and the loss of its finetuning scripts."""

    norm: Norm
    order: Order
    loss_kind: LossKind
    gated: bool  # LLaMAMLP or GemmaMLP; else GptNeoxMLP
    capped_scores: bool  # soft caps need the scores themselves: no kernel of torch's
    capped_logits: bool
    scaled_embedding: bool

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `plan.program.Program.embed`."""
        x = embedding(forward, weights["wte.weight"], forward.input_ids)
        if self.scaled_embedding:
            x = meta.scale(x)
        size = forward.architecture.rotary_dim
        cos = meta.empty(forward.meter, (1, 1, forward.tokens, size), "float32")
        sin = meta.empty(forward.meter, (1, 1, forward.tokens, size), "float32")
        return Embedded(x, (cos, sin), ())

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `plan.program.Program.block`."""
        normed = self._norm(forward, weights, "norm_1", x)
        attended = _attention(forward, weights, normed, shared, self.capped_scores)
        if self.order == "post-norms":
            attended = self._norm(forward, weights, "post_attention_norm", attended)
        if self.order.startswith("parallel"):
            if self.order == "parallel":
                normed = self._norm(forward, weights, "norm_2", x)
            x = meta.add(attended, x)
        else:
            x = meta.add(attended, x)
            normed = self._norm(forward, weights, "norm_2", x)
        fed = _feed(forward, weights, normed, self.gated)
        if self.order == "post-norms":
            fed = self._norm(forward, weights, "post_mlp_norm", fed)
        return meta.add(fed, x)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `plan.program.Program.finish`."""
        return self._norm(forward, weights, "ln_f", x)

    def loss(self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """Logits in fp32, which Fabric makes of a module's outputs, then a chunked cross entropy.

        The logits stay named in the training loop until the next micro-batch's replace them.
        """
        logits = self._logits(forward, weights, hidden)
        if self.loss_kind == "whole":
            flat = meta.reshape(logits[0], -1, logits[0].shape[-1])
            return meta.scale(cross_entropy_sum(flat, labels))
        forward.loop["logits"] = logits
        if self.loss_kind == "chunked-head":
            logits[-1] = meta.narrow(logits[-1], 1, 0, logits[-1].shape[1] - 1)
            pieces = [meta.reshape(piece, -1, piece.shape[-1]) for piece in logits]
        else:
            shifted = meta.narrow(logits[0], 1, 0, logits[0].shape[1] - 1)
            flat = meta.reshape(shifted, -1, shifted.shape[-1])
            del shifted
            pieces = meta.split(flat, _lengths(flat.shape[0]), 0)
        del logits
        losses = [cross_entropy_rows(piece, labels) for piece in pieces]
        joined = meta.concatenate(losses, 0)
        del losses
        return meta.scale(meta.scale(_total(joined)))

    def _logits(self, forward: Forward, weights: Weights, hidden: Tensor) -> list[Tensor]:
        if self.loss_kind == "chunked-head":
            parts = meta.split(hidden, _lengths(forward.tokens), 1)
            narrow = [self._head(forward, weights, part) for part in parts]
            del parts
        else:
            narrow = [self._head(forward, weights, hidden)]
        return [meta.cast(piece, "float32") for piece in narrow]

    def _head(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        logits = _project(forward, weights, "lm_head", x)
        return _soft_cap(logits) if self.capped_logits else logits

    def _norm(self, forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
        if self.norm == "layer":
            return _layer_norm(forward, weights, name, x)
        return _rms_norm(forward, weights[f"{name}.weight"], x, self.norm == "rms")


def _lengths(total: int) -> list[int]:
    whole, rest = total // CHUNK, total % CHUNK
    return [CHUNK] * int(whole) + ([rest] if rest else [])


@module
def _layer_norm(forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
    return meta.layer_norm(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


@module
def _rms_norm(forward: Forward, weight: Tensor, x: Tensor, wide: bool) -> Tensor:
    dtype = x.dtype
    x = meta.cast(x, "float32")
    mean = meta.mean_last(meta.mul(x, x))
    normed = meta.mul(x, meta.rsqrt(meta.shift(mean)))
    if not wide:
        normed = meta.cast(normed, dtype)
        return meta.mul(normed, weight)
    return meta.cast(meta.mul(normed, meta.cast(weight, "float32")), dtype)


@module
def _attention(
    forward: Forward, weights: Weights, x: Tensor, turn: tuple[Tensor, ...], capped: bool
) -> Tensor:
    a = forward.architecture
    rows, tokens, _ = x.shape
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    fused = _project(forward, weights, "attn.qkv", x)
    query, key, value = meta.split(fused, (queries, keys, keys), 2)
    del fused
    query = meta.transpose(meta.view(query, rows, tokens, a.heads, a.head_dim), 1, 2)
    key = meta.transpose(meta.view(key, rows, tokens, a.kv_heads, a.head_dim), 1, 2)
    value = meta.transpose(meta.view(value, rows, tokens, a.kv_heads, a.head_dim), 1, 2)
    size, rest = a.rotary_dim, a.head_dim - a.rotary_dim
    query_turned = _turn(meta.narrow(query, 3, 0, size), turn)
    key_turned = _turn(meta.narrow(key, 3, 0, size), turn)
    query = meta.concatenate((query_turned, meta.narrow(query, 3, size, rest)), 3)
    key = meta.concatenate((key_turned, meta.narrow(key, 3, size, rest)), 3)
    if a.kv_heads != a.heads:
        key = meta.expand_heads(key, a.heads // a.kv_heads)
        value = meta.expand_heads(value, a.heads // a.kv_heads)
    out = _attend(forward, query, key, value, capped)
    out = meta.reshape(meta.transpose(out, 1, 2), rows, tokens, queries)
    return _project(forward, weights, "attn.proj", out)


def _turn(x: Tensor, turn: tuple[Tensor, ...]) -> Tensor:
    half = x.shape[-1] // 2
    first, second = meta.narrow(x, 3, 0, half), meta.narrow(x, 3, half, half)
    turned = meta.concatenate((meta.negative(second), first), 3)
    roped = meta.add(meta.mul(x, turn[0]), meta.mul(turned, turn[1]))  # cosines are fp32
    return meta.cast(roped, x.dtype)


def _attend(forward: Forward, query: Tensor, key: Tensor, value: Tensor, capped: bool) -> Tensor:
    """A kernel of torch's; soft caps need the scores themselves."""
    if not capped:
        return meta.attention(forward.kernel, query, key, value)
    rows, heads, tokens, size = query.shape
    flat = meta.reshape(query, rows * heads, tokens, size)
    turned = meta.reshape(meta.transpose(key, 2, 3), rows * heads, size, tokens)
    scores = meta.scale(multiply_batched(flat, turned))
    scores = _soft_cap(scores)
    mask = meta.empty(forward.meter, (tokens, tokens), query.dtype)
    masked = meta.add(scores, mask)
    weights = meta.cast(_softmax(masked), query.dtype)
    product = multiply_batched(weights, meta.reshape(value, rows * heads, tokens, size))
    return meta.view(product, rows, heads, tokens, size)


def _softmax(x: Tensor) -> Tensor:
    """`F.softmax(x, dim=-1, dtype=float32)`: reads 16 bits, writes and saves 32."""
    node = record(_softmax_backward(x.dtype), (x,))
    result = attach(node, meta.empty(x.meter, x.shape, "float32"))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _softmax_backward(dtype: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad, _ = upstream(grads), node.unpack(0)
        return (meta.empty(grad.meter, grad.shape, dtype),)

    return rule


def _soft_cap(x: Tensor) -> Tensor:
    return meta.scale(meta.tanh(meta.scale(x)))


@module
def _feed(forward: Forward, weights: Weights, x: Tensor, gated: bool) -> Tensor:
    if not gated:
        x = _project(forward, weights, "mlp.fc", x)
        return _project(forward, weights, "mlp.proj", meta.gelu(x))
    first = _project(forward, weights, "mlp.fc_1", x)
    second = _project(forward, weights, "mlp.fc_2", x)
    x = meta.mul(meta.silu(first), second)  # GemmaMLP's gelu holds as much
    return _project(forward, weights, "mlp.proj", x)


@module
def _project(forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
    """LoRALinear, or LoRAQKVLinear for the fused projection."""
    result = _dense(weights, name, x)
    down = weights.get(f"{name}.lora_A")
    if down is None:
        return result
    up = weights[f"{name}.lora_B"]
    dropped = meta.dropout(x) if forward.adapter_dropout else x
    low = meta.linear(dropped, down)
    del dropped
    if name == "attn.qkv":
        delta = meta.scale(_pad(_grouped(forward, low, up), result))
    else:
        delta = meta.scale(meta.linear(low, up))
    del low
    return meta.add(result, delta)


def _dense(weights: Weights, name: str, x: Tensor) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if weight.dtype == QUANTISED_DTYPE:
        return quantised_linear(x, weight, bias, QUANTISED)
    return meta.linear(x, weight, bias)


def _grouped(forward: Forward, low: Tensor, up: Tensor) -> Tensor:
    """A grouped `F.conv1d` of kernel 1; with grouped heads one for each part, joined."""
    a = forward.architecture
    node = record(_grouped_backward(low.shape, up.shape), (low, up), (low, up))
    if a.kv_heads != a.heads:
        parts = meta.empty(low.meter, (*low.shape[:-1], up.shape[0]), low.dtype)
        result = attach(node, meta.empty(low.meter, parts.shape, low.dtype))
        del parts
        return result
    return attach(node, meta.empty(low.meter, (*low.shape[:-1], up.shape[0]), low.dtype))


def _grouped_backward(low: meta.Shape, up: meta.Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        node.unpack(0)
        return meta.empty(grad.meter, low, grad.dtype), meta.empty(grad.meter, up, grad.dtype)

    return rule


def _pad(x: Tensor, full: Tensor) -> Tensor:
    """`new_zeros(…).index_copy_(-1, indices, x)`: keeps x, for its shape alone."""
    if x.shape == full.shape:
        return x
    indices = meta.empty(x.meter, (x.shape[-1],), "int64")
    node = record(_pad_backward(x.shape), (x,), (indices, x))
    return attach(node, meta.empty(x.meter, full.shape, x.dtype))


def _pad_backward(shape: meta.Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        node.unpack(0)
        return (meta.empty(upstream(grads).meter, shape, upstream(grads).dtype),)

    return rule


def _total(x: Tensor) -> Tensor:
    """`x.sum()`."""
    node = record(_total_backward(x.shape), (x,))
    return attach(node, meta.empty(x.meter, (), x.dtype))


def _total_backward(shape: meta.Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (meta.empty(upstream(grads).meter, shape, upstream(grads).dtype),)

    return rule
