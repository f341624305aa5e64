"""litgpt's modules over `memfit.sizes`: model.py and lora.py of litgpt 0.5.13, line by line.

As in `families/forward.py`, a local variable here holds what it holds there.
"""

from __future__ import annotations

from memfit import sizes
from memfit.families.forward import Embedded, Forward, Weights, embedding, module
from memfit.nouns import Noun
from memfit.sizes import Tensor
from memfit.sizes.autograd import Gradients, Node, Rule, record
from memfit.sizes.coded import CODED, Dequantised, coded_linear
from memfit.sizes.elementwise import Incoming, attach, upstream
from memfit.sizes.loss import cross_entropy_rows, cross_entropy_sum
from memfit.sizes.products import multiply_batched

CHUNK = 128  # tokens of the chunked head and cross entropy (finetune/lora.py, utils.py)
# Fabric's plugin quantises what it has cast to fp16 (plugins/precision/bitsandbytes.py)
QUANTISED = Dequantised(stored="float16", keeps_input=True)


class LitProgram(Noun, frozen=True, kw_only=True):
    """The forward of litgpt's GPT and the loss of its finetuning scripts."""

    gated: bool  # LLaMAMLP or GemmaMLP; else GptNeoxMLP
    rms: bool  # RMSNorm; else LayerNorm
    parallel: bool  # attention and feed-forward side by side
    shared_norm: bool
    post_norms: bool  # norms after attention and feed-forward too
    capped_scores: bool  # soft caps need the scores themselves: no kernel of torch's
    capped_logits: bool
    scaled_embedding: bool
    wide_norm: bool  # RMSNorm multiplies by its weight in fp32
    chunked_head: bool  # finetune/lora.py; finetune/full.py chunks the loss alone
    whole_loss: bool  # extensions/thunder/pretrain.py: over all tokens at once

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `plan.program.Program.embed`."""
        x = embedding(forward, weights["wte.weight"], forward.input_ids)
        if self.scaled_embedding:
            x = sizes.scale(x)
        size = forward.architecture.rotary_dim
        cos = sizes.empty(forward.meter, (1, 1, forward.tokens, size), "float32")
        sin = sizes.empty(forward.meter, (1, 1, forward.tokens, size), "float32")
        return Embedded(x, (cos, sin), ())

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, given: tuple[Tensor, ...]
    ) -> Tensor:
        """See `plan.program.Program.block`."""
        normed = self._norm(forward, weights, "norm_1", x)
        attended = _attention(forward, weights, normed, given, self.capped_scores)
        if self.post_norms:
            attended = self._norm(forward, weights, "post_attention_norm", attended)
        if self.parallel:
            if not self.shared_norm:
                normed = self._norm(forward, weights, "norm_2", x)
            x = sizes.add(attended, x)
        else:
            x = sizes.add(attended, x)
            normed = self._norm(forward, weights, "norm_2", x)
        fed = _feed(forward, weights, normed, self.gated)
        if self.post_norms:
            fed = self._norm(forward, weights, "post_mlp_norm", fed)
        return sizes.add(fed, x)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `plan.program.Program.finish`."""
        return self._norm(forward, weights, "ln_f", x)

    def loss(self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """Logits in fp32, which Fabric makes of a module's outputs, then a chunked cross entropy.

        The logits stay named in the training loop until the next micro-batch's replace them.
        """
        logits = self._logits(forward, weights, hidden)
        if self.whole_loss:
            flat = sizes.reshape(logits[0], -1, logits[0].shape[-1])
            return sizes.scale(cross_entropy_sum(flat, labels))
        forward.loop["logits"] = logits
        if self.chunked_head:
            logits[-1] = sizes.narrow(logits[-1], 1, 0, logits[-1].shape[1] - 1)
            pieces = [sizes.reshape(piece, -1, piece.shape[-1]) for piece in logits]
        else:
            shifted = sizes.narrow(logits[0], 1, 0, logits[0].shape[1] - 1)
            flat = sizes.reshape(shifted, -1, shifted.shape[-1])
            del shifted
            pieces = sizes.split(flat, _lengths(flat.shape[0]), 0)
        del logits
        losses = [cross_entropy_rows(piece, labels) for piece in pieces]
        joined = sizes.concatenate(losses, 0)
        del losses
        return sizes.scale(sizes.scale(_total(joined)))

    def _logits(self, forward: Forward, weights: Weights, hidden: Tensor) -> list[Tensor]:
        if self.chunked_head:
            parts = sizes.split(hidden, _lengths(forward.tokens), 1)
            narrow = [self._head(forward, weights, part) for part in parts]
            del parts
        else:
            narrow = [self._head(forward, weights, hidden)]
        return [sizes.cast(piece, "float32") for piece in narrow]

    def _head(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        logits = _project(forward, weights, "lm_head", x)
        return _soft_cap(logits) if self.capped_logits else logits

    def _norm(self, forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
        if self.rms:
            return _rms_norm(forward, weights[f"{name}.weight"], x, self.wide_norm)
        return _layer_norm(forward, weights, name, x)


def _lengths(total: int) -> list[int]:
    whole, rest = total // CHUNK, total % CHUNK
    return [CHUNK] * int(whole) + ([rest] if rest else [])


@module
def _layer_norm(forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
    return sizes.layer_norm(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


@module
def _rms_norm(forward: Forward, weight: Tensor, x: Tensor, wide: bool) -> Tensor:
    dtype = x.dtype
    x = sizes.cast(x, "float32")
    mean = sizes.mean_last(sizes.mul(x, x))
    normed = sizes.mul(x, sizes.rsqrt(sizes.shift(mean)))
    if not wide:
        normed = sizes.cast(normed, dtype)
        return sizes.mul(normed, weight)
    return sizes.cast(sizes.mul(normed, sizes.cast(weight, "float32")), dtype)


@module
def _attention(
    forward: Forward, weights: Weights, x: Tensor, turn: tuple[Tensor, ...], capped: bool
) -> Tensor:
    a = forward.architecture
    rows, tokens, _ = x.shape
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    fused = _project(forward, weights, "attn.qkv", x)
    query, key, value = sizes.split(fused, (queries, keys, keys), 2)
    del fused
    query = sizes.transpose(sizes.view(query, rows, tokens, a.heads, a.head_dim), 1, 2)
    key = sizes.transpose(sizes.view(key, rows, tokens, a.kv_heads, a.head_dim), 1, 2)
    value = sizes.transpose(sizes.view(value, rows, tokens, a.kv_heads, a.head_dim), 1, 2)
    size, rest = a.rotary_dim, a.head_dim - a.rotary_dim
    query_turned = _turn(sizes.narrow(query, 3, 0, size), turn)
    key_turned = _turn(sizes.narrow(key, 3, 0, size), turn)
    query = sizes.concatenate((query_turned, sizes.narrow(query, 3, size, rest)), 3)
    key = sizes.concatenate((key_turned, sizes.narrow(key, 3, size, rest)), 3)
    if a.kv_heads != a.heads:
        key = sizes.expand_heads(key, a.heads // a.kv_heads)
        value = sizes.expand_heads(value, a.heads // a.kv_heads)
    out = _attend(forward, query, key, value, capped)
    out = sizes.reshape(sizes.transpose(out, 1, 2), rows, tokens, queries)
    return _project(forward, weights, "attn.proj", out)


def _turn(x: Tensor, turn: tuple[Tensor, ...]) -> Tensor:
    half = x.shape[-1] // 2
    first, second = sizes.narrow(x, 3, 0, half), sizes.narrow(x, 3, half, half)
    turned = sizes.concatenate((sizes.negative(second), first), 3)
    roped = sizes.add(sizes.mul(x, turn[0]), sizes.mul(turned, turn[1]))  # cosines are fp32
    return sizes.cast(roped, x.dtype)


def _attend(forward: Forward, query: Tensor, key: Tensor, value: Tensor, capped: bool) -> Tensor:
    """A kernel of torch's; soft caps need the scores themselves."""
    if not capped:
        return sizes.attention(forward.kernel, query, key, value)
    rows, heads, tokens, size = query.shape
    flat = sizes.reshape(query, rows * heads, tokens, size)
    turned = sizes.reshape(sizes.transpose(key, 2, 3), rows * heads, size, tokens)
    scores = sizes.scale(multiply_batched(flat, turned))
    scores = _soft_cap(scores)
    mask = sizes.empty(forward.meter, (tokens, tokens), query.dtype)
    masked = sizes.add(scores, mask)
    weights = sizes.cast(_softmax(masked), query.dtype)
    product = multiply_batched(weights, sizes.reshape(value, rows * heads, tokens, size))
    return sizes.view(product, rows, heads, tokens, size)


def _softmax(x: Tensor) -> Tensor:
    """`F.softmax(x, dim=-1, dtype=float32)`: reads 16 bits, writes and saves 32."""
    node = record(_softmax_backward(x.dtype), (x,))
    result = attach(node, sizes.empty(x.meter, x.shape, "float32"))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _softmax_backward(dtype: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad, _ = upstream(grads), node.unpack(0)
        return (sizes.empty(grad.meter, grad.shape, dtype),)

    return rule


def _soft_cap(x: Tensor) -> Tensor:
    return sizes.scale(sizes.tanh(sizes.scale(x)))


@module
def _feed(forward: Forward, weights: Weights, x: Tensor, gated: bool) -> Tensor:
    if not gated:
        x = _project(forward, weights, "mlp.fc", x)
        return _project(forward, weights, "mlp.proj", sizes.gelu(x))
    first = _project(forward, weights, "mlp.fc_1", x)
    second = _project(forward, weights, "mlp.fc_2", x)
    x = sizes.mul(sizes.silu(first), second)  # GemmaMLP's gelu holds as much
    return _project(forward, weights, "mlp.proj", x)


@module
def _project(forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
    """LoRALinear, or LoRAQKVLinear for the fused projection."""
    result = _dense(weights, name, x)
    down = weights.get(f"{name}.lora_A")
    if down is None:
        return result
    up = weights[f"{name}.lora_B"]
    dropped = sizes.dropout(x) if forward.adapter_dropout else x
    low = sizes.linear(dropped, down)
    del dropped
    if name == "attn.qkv":
        delta = sizes.scale(_pad(_grouped(forward, low, up), result))
    else:
        delta = sizes.scale(sizes.linear(low, up))
    del low
    return sizes.add(result, delta)


def _dense(weights: Weights, name: str, x: Tensor) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if weight.dtype == CODED:
        return coded_linear(x, weight, bias, QUANTISED)
    return sizes.linear(x, weight, bias)


def _grouped(forward: Forward, low: Tensor, up: Tensor) -> Tensor:
    """A grouped `F.conv1d` of kernel 1; with grouped heads one for each part, joined."""
    a = forward.architecture
    node = record(_grouped_backward(low.shape, up.shape), (low, up), (low, up))
    if a.kv_heads != a.heads:
        parts = sizes.empty(low.meter, (*low.shape[:-1], up.shape[0]), low.dtype)
        result = attach(node, sizes.empty(low.meter, parts.shape, low.dtype))
        del parts
        return result
    return attach(node, sizes.empty(low.meter, (*low.shape[:-1], up.shape[0]), low.dtype))


def _grouped_backward(low: sizes.Shape, up: sizes.Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        node.unpack(0)
        return sizes.empty(grad.meter, low, grad.dtype), sizes.empty(grad.meter, up, grad.dtype)

    return rule


def _pad(x: Tensor, full: Tensor) -> Tensor:
    """`new_zeros(…).index_copy_(-1, indices, x)`: keeps x, for its shape alone."""
    if x.shape == full.shape:
        return x
    indices = sizes.empty(x.meter, (x.shape[-1],), "int64")
    node = record(_pad_backward(x.shape), (x,), (indices, x))
    return attach(node, sizes.empty(x.meter, full.shape, x.dtype))


def _pad_backward(shape: sizes.Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        node.unpack(0)
        return (sizes.empty(upstream(grads).meter, shape, upstream(grads).dtype),)

    return rule


def _total(x: Tensor) -> Tensor:
    """`x.sum()`."""
    node = record(_total_backward(x.shape), (x,))
    return attach(node, sizes.empty(x.meter, (), x.dtype))


def _total_backward(shape: sizes.Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (sizes.empty(upstream(grads).meter, shape, upstream(grads).dtype),)

    return rule
