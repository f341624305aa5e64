"""Forward passes over `memfit.meta`, written as Hugging Face's modules are.

What a local variable holds here is what it holds there, to the last line of a function: a name
that looks superfluous keeps a tensor alive as long as the real one is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec

from memfit import meta
from memfit.families.capabilities.turned import find_turned_rows
from memfit.families.shared.masks import Masks, attend_masked
from memfit.meta import Meter, Tensor
from memfit.meta.attending.grown import Grown
from memfit.meta.attending.slots import Decode, Prefill, attend_slots
from memfit.meta.distributed.ring import Ring, ring_attention
from memfit.meta.distributed.sharding import Unit
from memfit.meta.elementwise import autocast_lower
from memfit.meta.layers import float8, lean, liger
from memfit.meta.layers.dequantised import QUANTISED_DTYPE, Dequantised
from memfit.meta.layers.dora import rescale
from memfit.meta.layers.qat import GROUP, round_weight
from memfit.meta.layers.quantised import Quantised
from memfit.meta.losses.cross_entropy import Bends, bent_mean, chunked_sum, cross_entropy_sum
from memfit.meta.losses.policy import TokenLogProbs, chunked_token_log_probs, plain_token_log_probs
from memfit.meta.losses.preference import chunked_log_probs, merge_context, plain_log_probs
from memfit.meta.losses.scores import at_ends
from memfit.records.model import VALUE_MODEL, Architecture
from memfit.records.recipe import Regularisation

Weights = dict[str, Tensor]  # by name inside the block, or inside the model
Rotation = tuple[Tensor, Tensor]  # cosines, sines
Turn = Rotation | None  # None where a block does not rotate
# products of no block
OUTSIDE = ("lm_head", "score", "reward_score", "decoder.project_in", "decoder.project_out")
BASE_LAYER = ".base_layer."  # in names of a module that an adapter stands beside
# in names of a module that peft has copied to be trained: the module's own, and the copy's
ORIGINAL, COPY = ".original_module.", ".modules_to_save.default."
Documents = tuple[int, ...]  # the lengths of a row's documents, the same in every row


class Forward(msgspec.Struct, frozen=True):
    """What every part of a forward needs to know."""

    architecture: Architecture
    meter: Meter
    kernel: str  # math | flash | efficient | cudnn | varlen
    input_ids: Tensor  # (batch, tokens)
    position_ids: Tensor | None  # (batch, tokens) of packed rows
    documents: Documents | None
    adapter_dropout: bool = False
    narrow: bool = False  # products of blocks run in FP8
    qat: str = ""  # weights of blocks are rounded to it in each product
    regularisation: Regularisation = Regularisation()
    # ranks that have parts of a row's tokens between products, where NEFTune's noise is drawn row
    # after row for all of them; 0 where it is drawn in its place
    noise_parts: int = 0
    lean: tuple[str, ...] = ()  # operations that keep less, see train/lean
    liger: tuple[str, ...] = ()  # rope, rms_norm, swiglu: those that are Liger-Kernel's
    kind: str = ""  # of the block that runs, where the architecture has kinds
    band: Tensor | None = None  # the mask of sliding windows, where rows are longer than they are
    masks: Masks | None = (
        None  # where attention is Hugging Face's own, see families/shared/masks.py
    )
    starts: Tensor | None = None  # of documents, where one call of the kernel serves them all
    ring: Ring | None = None  # with which ranks attention is to whole rows
    slots: Prefill | Decode | Grown | None = None  # keys and values that generation keeps
    quantised: Dequantised | Quantised = Quantised()  # how weights stored quantised are multiplied
    repeats_keys: bool = False  # keys and values are made for all heads, whatever the kernel
    adapter_casts: bool = False  # adapters read inputs cast to their own dtype, as peft has them
    by_columns: bool = False  # how a rollout on a CPU holds weights, see capabilities/turned.py
    only_added: str = ""  # the projection of a block whose result a selective region forgets
    # what variables of the training loop hold until the next micro-batch names them again
    loop: dict[str, list[Tensor]] = {}
    # units of FSDP2 whose forward is a part of the model's own code: the embedding's, the head's
    embeds: Unit | None = None
    tail: Unit | None = None
    # what a block returned beside its output: alive until the next block has returned
    beside: list[Tensor] = msgspec.field(default_factory=list)

    @property
    def batch(self) -> int:
        """Rows of the micro-batch."""
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return self.input_ids.shape[1]

    @property
    def reach(self) -> int:
        """Tokens that a row's last one attends to, at most."""
        return self.slots.reach if isinstance(self.slots, Decode) else self.tokens


class Embedded(NamedTuple):
    """What a backbone makes before its first block."""

    x: Tensor  # enters the first block: (batch, tokens, hidden)
    shared: tuple[Tensor, ...]  # to every block, which holds it while it may be recomputed
    locals: tuple[Tensor, ...]  # local variables that live as long as the backbone's call
    own: Mapping[str, tuple[Tensor, ...]] = {}  # by kind of block: what it alone is given first


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def module(
    function: Callable[Concatenate[Forward, Arguments], Result],
) -> Callable[Concatenate[Forward, Arguments], Result]:
    """A function that is a module of its own: what it allocates and returns is an activation.

    Its local variables are gone when the module's call ends, as in `nn.Module.__call__`.
    """

    @wraps(function)
    def call(forward: Forward, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        number = forward.meter.begin_module()
        try:
            return function(forward, *arguments, **named)
        finally:
            forward.meter.end_module(number)

    return call


def unchanged(x: Tensor) -> Tensor:
    """Of products that each rank makes whole."""
    return x


def project(
    forward: Forward, weights: Weights, name: str, x: Tensor,
    sum_parts: Callable[[Tensor], Tensor] = unchanged,
) -> Tensor:  # fmt: skip
    """A projection: Linear or Conv1D, with its bias and its adapter when it has them.

    sum_parts: what ranks do with a product of which each has a part.
    """
    if name in OUTSIDE and forward.lean:  # only products of blocks are lean
        forward = msgspec.structs.replace(forward, lean=())
    if name == forward.only_added:
        with forward.meter.forgetting():
            return sum_parts(_plain(forward, weights, name, x))
    if f"{name}.lora_A.default.weight" in weights:
        return _adapted(forward, weights, name, x, sum_parts)
    return sum_parts(_plain(forward, weights, name, x))


@module
def _plain(forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if weight.dtype == QUANTISED_DTYPE:
        return forward.quantised.multiply(x, weight, bias)
    family, of_head = forward.architecture.family, name == "lm_head"
    if forward.narrow and not of_head:
        return float8.linear(x, weight, bias)
    if forward.qat and not of_head:
        weight = round_weight(weight, GROUP if forward.qat == "int4" else weight.shape[1])
    turned = family == "gpt2" and bias is not None
    plain = of_head or (not turned and family != "falcon")
    if forward.by_columns and plain and (rows := find_turned_rows(weight.shape, weight.dtype)):
        return meta.linear_by_columns(x, weight, rows, bias)
    if forward.lean:
        return lean.linear(x, weight, bias, turned)
    if turned and bias is not None:
        return meta.conv1d(x, weight, bias)
    if family == "falcon" and not of_head:
        return meta.multiply_turned(x, weight, bias)
    return meta.linear(x, weight, bias)


@module
def _adapted(
    forward: Forward, weights: Weights, name: str, x: Tensor,
    sum_parts: Callable[[Tensor], Tensor] = unchanged,
) -> Tensor:  # fmt: skip
    """LoRA: base(x) + B(A(x)) * scaling, in the dtype of base(x); DoRA where there are lengths."""
    result = sum_parts(_plain(forward, weights, f"{name}.base_layer", x))
    down, up = (
        weights[f"{name}.lora_A.default.weight"],
        weights[f"{name}.lora_B.default.weight"],
    )
    if magnitude := weights.get(f"{name}.lora_magnitude_vector.default.weight"):
        base = weights[f"{name}.base_layer.weight"], weights.get(f"{name}.base_layer.bias")
        dtype, x_base = result.dtype, x

        def make_added() -> Tensor:
            entering = _drop(forward, x_base) if forward.adapter_dropout else x_base
            return _matrix(forward, up, _matrix(forward, down, entering))

        result = rescale(result, base, (down, up), magnitude, make_added)
        return meta.cast(result, dtype)
    if forward.adapter_casts:
        x = meta.cast(x, down.dtype)
    with forward.meter.forgetting():
        low = _matrix(forward, down, _drop(forward, x) if forward.adapter_dropout else x)
        low = sum_parts(low)
        delta = _matrix(forward, up, low)
    del low
    scaled = meta.scale(delta)
    del delta
    dtype, result = result.dtype, meta.add(result, scaled)
    del scaled
    return meta.cast(result, dtype)


@module
def _matrix(forward: Forward, weight: Tensor, x: Tensor) -> Tensor:
    return lean.linear(x, weight) if forward.lean else meta.linear(x, weight)


@module
def _drop(forward: Forward, x: Tensor) -> Tensor:
    return meta.dropout(x)


@module
def rms_norm(forward: Forward, weight: Tensor, x: Tensor, feeds: bool = True) -> Tensor:
    """Root mean square norm in fp32, as Llama's class writes it; feeds: see `lean.rms_norm`."""
    if "norm" in forward.lean:
        return lean.rms_norm(x, weight, feeds=feeds)
    if "rms_norm" in forward.liger:
        return liger.rms_norm(x, weight, forward.meter.grid)
    dtype = x.dtype
    x = meta.cast(x, "float32")
    variance = meta.mean_last(meta.power(x))
    x = meta.mul(x, meta.rsqrt(meta.shift(variance)))
    return meta.mul(weight, meta.cast(x, dtype))


@module
def apply_layer_norm(
    forward: Forward, weights: Weights, name: str, x: Tensor, feeds: bool = True
) -> Tensor:
    """`nn.LayerNorm`; feeds: see `lean.rms_norm`."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if "norm" in forward.lean:
        return lean.layer_norm(x, weight, bias, feeds=feeds)
    return meta.layer_norm(x, weight, bias)


@module
def activate(forward: Forward, x: Tensor) -> Tensor:
    """The feed-forward's activation function, by Hugging Face's name for it."""
    if "mlp" in forward.lean:
        return lean.activation(x)
    return _ACTIVATIONS[forward.architecture.activation](x)


def _gelu_new(x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3))), eight kernels."""
    half = meta.scale(x)
    inner = meta.scale(meta.add(x, meta.scale(meta.power(x))))
    curve = meta.tanh(inner)
    del inner
    bent = meta.shift(curve)
    del curve
    return meta.mul(half, bent)


def gelu_fast(x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(c * x * (1 + 0.044715 * x * x))), nine kernels."""
    half = meta.scale(x)
    outer = meta.scale(x)
    inner = meta.shift(meta.mul(meta.scale(x), x))
    product = meta.mul(outer, inner)
    del outer, inner
    curve = meta.tanh(product)
    del product
    bent = meta.shift(curve)
    del curve
    return meta.mul(half, bent)


def _squared_relu(x: Tensor) -> Tensor:
    bent = meta.relu(x)
    squared = meta.power(bent)
    return squared  # noqa: RET504 - what was bent is alive until here


_ACTIVATIONS = {
    "silu": meta.silu,
    "gelu": meta.gelu,
    "gelu_pytorch_tanh": meta.gelu,
    "gelu_new": _gelu_new,
    "gelu_fast": gelu_fast,
    "relu": meta.relu,
    "relu2": _squared_relu,
}


def embedding(forward: Forward, weight: Tensor, indices: Tensor) -> Tensor:
    """`nn.Embedding`, and NEFTune's noise on those of tokens."""
    rows = _embedding(forward, weight, indices)
    return with_noise(forward, rows) if indices is forward.input_ids else rows


@module
def _embedding(forward: Forward, weight: Tensor, indices: Tensor) -> Tensor:
    return within(unit_of(forward, weight), lambda: meta.gather_rows(weight, indices))


def with_noise(forward: Forward, rows: Tensor) -> Tensor:
    """NEFTune's, as train/habits/noise.py, whose hook runs when the module's call is over."""
    if not forward.regularisation.neftune_alpha:
        return rows
    noise = meta.empty(rows.meter, rows.shape, rows.dtype)
    if forward.noise_parts:
        _, tokens, width = rows.shape
        drawn = meta.empty(rows.meter, (tokens * forward.noise_parts, width), rows.dtype)
        del drawn
    return meta.add(rows, noise)


def unit_of(forward: Forward, weight: Tensor) -> Unit | None:
    """FSDP2's unit that holds the token embedding; None for other embeddings."""
    unit = forward.embeds
    return unit if unit is not None and unit.weights[0][0] is weight else None


def within(unit: Unit | None, run: Callable[[], Tensor]) -> Tensor:
    """The forward of a module that is a unit of FSDP2, and whose input has no gradient."""
    if unit is None:
        return run()
    unit.gather()
    out = run()
    unit.leave(out)
    return out


def positions(forward: Forward) -> Tensor:
    """Position ids: those of packed rows, or 0 … tokens - 1."""
    if forward.position_ids is not None:
        return forward.position_ids
    counted = meta.empty(forward.meter, (forward.tokens,), "int64")
    shifted = meta.empty(forward.meter, (forward.tokens,), "int64")
    del counted
    return meta.unsqueeze(shifted, 0)


@module
def rotation(forward: Forward, dtype: str, position_ids: Tensor) -> Rotation:
    """Cosines and sines (batch or 1, tokens, rotary_dim), without a gradient."""
    meter, size = forward.meter, forward.architecture.rotary_dim
    rows, tokens = position_ids.shape
    wide = meta.empty(meter, (rows, tokens, 1), "float32")
    frequencies = meta.empty(meter, (rows, tokens, size // 2), "float32")
    del wide
    both = meta.empty(meter, (rows, tokens, size), "float32")
    cosines = _times_one(meta.empty(meter, both.shape, "float32"))
    sines = _times_one(meta.empty(meter, both.shape, "float32"))
    result = meta.cast(cosines, dtype), meta.cast(sines, dtype)
    del frequencies
    return result


def _times_one(x: Tensor) -> Tensor:
    """`x * attention_scaling`."""
    return meta.empty(x.meter, x.shape, x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """(..., size) -> (-second half, first half)."""
    half, last = x.shape[-1] // 2, len(x.shape) - 1
    first = meta.narrow(x, last, 0, half)
    second = meta.narrow(x, last, half, x.shape[-1] - half)
    return meta.concatenate((meta.negative(second), first), last)


def rotate(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Rotary embedding of whole heads (Su et al. 2104.09864)."""
    cos, sin = meta.unsqueeze(turn[0], 1), meta.unsqueeze(turn[1], 1)
    query_rotated = turn_part(query, cos, sin)
    key_rotated = turn_part(key, cos, sin)
    return query_rotated, key_rotated


def turn_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin."""
    return meta.add(meta.mul(x, cos), meta.mul(rotate_half(x), sin))


def rotate_part(query: Tensor, key: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the first elements of each head; the rest is concatenated unchanged."""
    cos, sin = meta.unsqueeze(turn[0], 1), meta.unsqueeze(turn[1], 1)
    query_part, query_rest = cut_head(query, cos.shape[-1])
    key_part, key_rest = cut_head(key, cos.shape[-1])
    query_rotated = turn_part(query_part, cos, sin)
    key_rotated = turn_part(key_part, cos, sin)
    query_rotated = meta.concatenate((query_rotated, query_rest), 3)
    key_rotated = meta.concatenate((key_rotated, key_rest), 3)
    return query_rotated, key_rotated


def cut_head(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first `size` elements of each head, and the rest."""
    rest = x.shape[-1] - size
    part = meta.narrow(x, 3, 0, size) if rest else x  # `x[..., :all]` is x itself
    return part, meta.narrow(x, 3, size, rest)


def keep(forward: Forward, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What a cache returns of keys and values: while answers are sampled, those to attend with."""
    if forward.slots is None:
        return key, value
    return forward.slots.store(key, value, forward.architecture.window(forward.kind))


def attend(forward: Forward, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(batch, heads, tokens, size) -> (batch, tokens, heads, size), as train/model/attention.py.

    Where the forward has masks: as Hugging Face's own functions.
    """
    if isinstance(forward.slots, Decode):
        capped = forward.architecture.attention_cap > 0
        return attend_slots(forward.slots, query, key, value, capped=capped)
    if forward.masks is not None:
        out = attend_masked(
            forward.masks, forward.architecture, forward.kind, query, key, value
        )  # fmt: skip
        return meta.transpose(out, 1, 2)
    if forward.starts is not None:
        return meta.end_to_end(query, key, value, forward.starts)
    if forward.ring is not None:
        return meta.transpose(ring_attention(query, key, value, forward.ring), 1, 2)
    a, width = forward.architecture, value.shape[-1]
    padding = query.shape[-1] - width if forward.kernel == "flash" else 0
    if padding:
        value = meta.pad_last(value, padding)
    repeats = a.attention_cap or forward.repeats_keys or forward.kernel == "efficient"
    if query.shape[1] != key.shape[1] and repeats:
        groups = query.shape[1] // key.shape[1]
        repeat = meta.expand_heads if forward.repeats_keys else meta.repeat_heads
        key, value = repeat(key, groups), repeat(value, groups)

    call = partial(_attend_once, forward)
    if forward.documents is None:
        out = call(query, key, value)
    else:
        out = meta.by_document(call, query, key, value, forward.documents)
    if padding:
        out = meta.narrow(out, 3, 0, width)
    return meta.transpose(out, 1, 2)


def _attend_once(forward: Forward, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One call of the kernel: capped, within a window, or causal."""
    a = forward.architecture
    if a.attention_cap:
        return meta.capped(query, key, value)
    window = a.window(forward.kind)
    if not window or key.shape[2] <= window:
        return meta.attention(forward.kernel, query, key, value)
    kernel, band = forward.kernel, forward.band
    if band is None:  # prompts are read without a mask for all blocks
        kernel = "math" if kernel == "flash" and query.meter.cuda else kernel
        whole = meta.make_band(query, key.shape[2], query.dtype)
        return meta.attention(kernel, query, key, value, autocast_lower(whole))
    return meta.attention(kernel, query, key, value, band)


Projection = Callable[[Forward, Weights, str, Tensor], Tensor]


@module
def gated_attention(
    forward: Forward, weights: Weights, x: Tensor, turn: Turn, last: Projection = project
) -> Tensor:
    """Llama's attention: grouped heads, rotary positions; Qwen3's norms when the block has them.

    last: what the output projection is, where it is more than a product.
    """
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = heads(forward, weights, "self_attn.q_proj", x, shape, "self_attn.q_norm.weight")
    key = heads(forward, weights, "self_attn.k_proj", x, shape, "self_attn.k_norm.weight")
    value = heads(forward, weights, "self_attn.v_proj", x, shape)
    if turn is not None and "rope" in forward.liger:
        query, key = liger.rotate(query, key, *turn)
    elif turn is not None:
        query, key = rotate(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = last(forward, weights, "self_attn.o_proj", out)  # the product's input is let go first
    return out  # noqa: RET504


def heads(
    forward: Forward, weights: Weights, name: str, x: Tensor, shape: meta.Shape, norm: str = ""
) -> Tensor:
    """A projection as (batch, heads, tokens, size), each head normed where it has a norm."""
    split = meta.view(project(forward, weights, name, x), *shape)
    if norm in weights:
        split = rms_norm(forward, weights[norm], split, feeds=False)
    return meta.transpose(split, 1, 2)


@module
def gated_mlp(
    forward: Forward,
    weights: Weights,
    x: Tensor,
    name: str = "mlp",
    last: Projection = project,
) -> Tensor:
    """SwiGLU (Shazeer 2002.05202): down(act(gate(x)) * up(x)); `last` as in `gated_attention`."""
    if "mlp" in forward.lean:
        return _lean_mlp(forward, weights, x, name)
    if "swiglu" in forward.liger:
        gate = project(forward, weights, f"{name}.gate_proj", x)
        product = liger.silu_mul(gate, project(forward, weights, f"{name}.up_proj", x))
        del gate
        return last(forward, weights, f"{name}.down_proj", product)
    gate = activate(forward, project(forward, weights, f"{name}.gate_proj", x))
    up = project(forward, weights, f"{name}.up_proj", x)
    product = meta.mul(gate, up)
    del gate, up
    return last(forward, weights, f"{name}.down_proj", product)


def _lean_mlp(forward: Forward, weights: Weights, x: Tensor, name: str) -> Tensor:
    gate = project(forward, weights, f"{name}.gate_proj", x)
    up = project(forward, weights, f"{name}.up_proj", x)
    return project(forward, weights, f"{name}.down_proj", lean.gated_product(gate, up))


@module
def plain_mlp(forward: Forward, weights: Weights, up: str, down: str, x: Tensor) -> Tensor:
    """down(act(up(x)))."""
    x = project(forward, weights, up, x)
    x = activate(forward, x)
    return project(forward, weights, down, x)


def bend_logits(a: Architecture, logits: Tensor) -> Tensor:
    """The head's logits as Hugging Face's class returns them: divided (Granite), or bent by a tanh
    to stay below a cap (Gemma). What calls this keeps no name for them: they are let go on the way.
    """
    if a.logits_scaled or a.logit_cap:
        logits = meta.scale(logits)
    if a.logit_cap:
        logits = meta.tanh(logits)
        logits = meta.scale(logits)
    return logits


def loss_mean(
    forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor, chunk: int
) -> Tensor:
    """The loss, as train/step/loss.py: (batch, tokens, hidden) -> (); chunk 0 is the plain one."""
    a = forward.architecture
    if a.logits_scaled or a.logit_cap:
        hidden = meta.scale(hidden)
    if not chunk:
        if forward.regularisation.bends:
            logits = _head(forward, weights, hidden)
            return bent_mean(logits, bool(a.logit_cap), find_bends(forward))
        return meta.scale(_plain_sum(forward, weights, hidden, labels))
    flat = meta.view(hidden, forward.batch * forward.tokens, hidden.shape[-1])
    bends = find_bends(forward)
    total = chunked_sum(flat, weights["lm_head.weight"], chunk, bool(a.logit_cap), bends)
    if forward.tail is not None:
        forward.tail.leave(total)
    return total


def find_bends(forward: Forward) -> Bends:
    """What the loss has beside the cross-entropy."""
    stated = forward.regularisation
    return Bends(bool(stated.label_smoothing), bool(stated.z_loss))


def _plain_sum(forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = _wide_logits(forward, weights, hidden)
    return cross_entropy_sum(logits, labels)


def _head(forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
    """(tokens, vocab), as the head's product is."""
    flat = meta.view(hidden, forward.batch * forward.tokens, hidden.shape[-1])
    head = project(forward, weights, "lm_head", flat)
    if forward.tail is not None:
        forward.tail.leave(head)
    return head


def _wide_logits(forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
    """(tokens, vocab), fp32."""
    head = _head(forward, weights, hidden)
    if forward.architecture.logit_cap:
        head = meta.scale(meta.tanh(head))
    return meta.cast(head, "float32")


def row_scores(
    forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor, head: str = "score"
) -> Tensor:
    """A score of each row, as train/step/preference.py: -> (batch,), fp32."""
    picked = at_ends(hidden, labels, shared=forward.ring is not None)
    score = project(forward, weights, head, picked)
    del picked
    if forward.tail is not None:
        forward.tail.leave(score)
    return meta.view(meta.cast(score, "float32"), forward.batch)


def token_values(forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
    """A value of each token, as train/step/step.py: (batch, tokens, hidden) -> (batch, tokens)."""
    made = project(forward, weights, "score", hidden)
    return meta.view(meta.cast(made, "float32"), forward.batch, forward.tokens)


def with_adapter(weights: Weights, adapter: str) -> Weights:
    """The weights with another adapter, such as `value`, in place of the policy's."""
    own = f".{adapter}."
    return without_wrappers(
        {
            name.replace(own, ".default.") if ".lora_" in name else name: weight
            for name, weight in weights.items()
            if ".lora_" not in name or own in name
        }
    )


def with_values(weights: Weights) -> Weights:
    """The weights with those of a value's own model in place of the policy's."""
    own = of_policy(weights)
    return own | {n.removeprefix(VALUE_MODEL): w for n, w in weights.items() if n not in own}


def of_policy(weights: Weights) -> Weights:
    """The weights without those of a value's own model."""
    return {n: w for n, w in weights.items() if not n.startswith(VALUE_MODEL)}


def without_wrappers(weights: Weights) -> Weights:
    """The same, where modules that only another adapter stands beside are plain products."""
    return {
        name.replace(BASE_LAYER, ".") if not _is_adapted(weights, name) else name: weight
        for name, weight in weights.items()
    }


def _is_adapted(weights: Weights, name: str) -> bool:
    return f"{name.partition(BASE_LAYER)[0]}.lora_A.default.weight" in weights


def base_alone(weights: Weights) -> Weights:
    """The weights without their adapters and trained copies, and without a gradient."""
    originals = [name for name in weights if ORIGINAL in name]
    copies = {name.replace(ORIGINAL, ".") for name in originals}
    return {
        name.replace(".base_layer.", ".").replace(ORIGINAL, "."): weight.detached()
        for name, weight in weights.items()
        if ".lora_" not in name and name not in copies
    }


def row_log_probs(
    forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor, chunk: int,
    context: Tensor | None = None, *, cut: bool = False,
) -> Tensor:  # fmt: skip
    """Log-probabilities of rows, as train/step/preference.py: -> (batch,), with a context (2,
    batch); chunk 0: at once. cut: ranks share the vocabulary."""
    a = forward.architecture
    if a.logits_scaled or a.logit_cap:
        hidden = meta.scale(hidden)
    if not chunk:
        labels, answered = merge_context(labels, context)
        logits = _wide_logits(forward, weights, hidden)
        return plain_log_probs(logits, labels, answered, cut=cut)
    flat = meta.view(hidden, forward.batch * forward.tokens, hidden.shape[-1])
    labels, answered = merge_context(labels, context)
    found = chunked_log_probs(
        flat, weights["lm_head.weight"], labels, answered, chunk, bool(a.logit_cap)
    )
    if forward.tail is not None:
        forward.tail.leave(found)
    return found


def token_log_probs(
    forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor, chunk: int, *, heated: bool
) -> TokenLogProbs:
    """Log-probabilities and entropies of tokens, as train/rl/token_log_probs.py; chunk 0: at once.

    heated: whether a temperature divides the logits.
    """
    a = forward.architecture
    if a.logits_scaled or a.logit_cap or heated:
        hidden = meta.scale(hidden)
    if not chunk:
        return plain_token_log_probs(_wide_logits(forward, weights, hidden), labels)
    flat = meta.view(hidden, forward.batch * forward.tokens, hidden.shape[-1])
    head = weights["lm_head.weight"]
    return chunked_token_log_probs(flat, head, labels, chunk, bool(a.logit_cap))
