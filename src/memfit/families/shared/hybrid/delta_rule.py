"""The gated delta rule as Hugging Face's classes write it out over torch (`qwen3_5`, `qwen3_next`).

This is what runs where neither flash-linear-attention nor causal-conv1d is installed: other kernels
keep other tensors. Names of variables follow those of the class, which hold what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit import meta
from memfit.families.shared.forward import Forward, Weights, module, project
from memfit.meta import Meter, Tensor
from memfit.meta.attending.slots import Decode, Prefill
from memfit.meta.autograd import Region
from memfit.meta.elementwise import exp, like, sigmoid, softplus
from memfit.meta.recurrent.operations import (
    cast_row_major,
    convolve,
    cumulative_sum,
    matmul,
    pad,
    repeat_heads,
    solve_triangular,
    sum_last,
)
from memfit.records.model import CHUNK, Architecture

TURNS = 5  # simulated of a scan with more: the first, one for all in the middle, and the last three
NAME = "linear_attn"
GATES = (f"{NAME}.in_proj_a", f"{NAME}.in_proj_b")  # of decay and of writing
JOINED_GATES = (f"{NAME}.in_proj_ba",)  # of both
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # queries, keys, values, decays, betas


def chunks_of(tokens: int) -> int:
    """The chunks that a row of that many tokens is cut into."""
    return -(-tokens // CHUNK)


class Entered(NamedTuple):
    """What linear attention makes of a block's input before the convolution."""

    mixed: Tensor  # queries, keys and values: (batch, channels, tokens)
    z: Tensor  # the output's gate: (batch, tokens, value_heads, value)
    b: Tensor  # gates of writing and of decay: (batch, tokens, value_heads)
    a: Tensor
    parts: list[Tensor]  # local variables until the convolution's result is cut
    products: tuple[Tensor, ...]  # local variables until the module returns


Entry = Callable[[Forward, Weights, Tensor], Entered]


@module
def gated_delta_net(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """Linear attention of one block of Qwen3.5: (batch, tokens, hidden) -> the same."""
    return _attend_linearly(forward, weights, x, _enter_apart)


@module
def joined_delta_net(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """Linear attention of one block of Qwen3-Next: (batch, tokens, hidden) -> the same."""
    return _attend_linearly(forward, weights, x, _enter_joined)


def _enter_apart(forward: Forward, weights: Weights, x: Tensor) -> Entered:
    """A product for queries, keys and values, and one for each of the gates."""
    batch, tokens, _ = x.shape
    mixed = meta.transpose(project(forward, weights, f"{NAME}.in_proj_qkv", x), 1, 2)
    z = project(forward, weights, f"{NAME}.in_proj_z", x)
    z = meta.reshape(z, batch, tokens, -1, forward.architecture.linear.value)
    b = project(forward, weights, f"{NAME}.in_proj_b", x)
    a = project(forward, weights, f"{NAME}.in_proj_a", x)
    return Entered(mixed, z, b, a, [], ())


def _enter_joined(forward: Forward, weights: Weights, x: Tensor) -> Entered:
    """Two products whose columns are grouped by heads of keys
    (`fix_query_key_value_ordering` of `Qwen3NextGatedDeltaNet`)."""
    linear, (batch, tokens, _) = forward.architecture.linear, x.shape
    repeats = linear.value_heads // linear.key_heads
    qkvz = project(forward, weights, f"{NAME}.in_proj_qkvz", x)
    ba = project(forward, weights, f"{NAME}.in_proj_ba", x)
    heads = (batch, tokens, linear.key_heads, -1)
    widths = [linear.key] * 2 + [repeats * linear.value] * 2
    query, key, value, z = meta.split(meta.view(qkvz, *heads), widths, 3)
    b, a = meta.split(meta.view(ba, *heads), [repeats] * 2, 3)
    value = meta.reshape(value, batch, tokens, -1, linear.value)
    z = meta.reshape(z, batch, tokens, -1, linear.value)
    b = meta.reshape(b, batch, tokens, linear.value_heads)
    a = meta.reshape(a, batch, tokens, linear.value_heads)
    parts = [meta.reshape(part, batch, tokens, -1) for part in (query, key, value)]
    mixed = meta.transpose(meta.concatenate(parts, 2), 1, 2)
    return Entered(mixed, z, b, a, parts, (qkvz, ba))


def _attend_linearly(forward: Forward, weights: Weights, x: Tensor, enter: Entry) -> Tensor:
    linear = forward.architecture.linear
    batch, tokens, _ = x.shape
    mixed, z, b, a, parts, products = enter(forward, weights, x)
    mixed = _convolve(forward, mixed, weights[f"{NAME}.conv1d.weight"])
    mixed = meta.transpose(mixed, 1, 2)
    widths = [linear.key_heads * linear.key] * 2 + [linear.value_heads * linear.value]
    query, key, value = meta.split(mixed, widths, 2)
    parts.clear()
    query = meta.reshape(query, batch, tokens, -1, linear.key)
    key = meta.reshape(key, batch, tokens, -1, linear.key)
    value = meta.reshape(value, batch, tokens, -1, linear.value)
    beta = sigmoid(b)
    decay = find_decay(a, weights[f"{NAME}.A_log"], weights[f"{NAME}.dt_bias"])
    states: list[Tensor] = []  # after the last token, where it is stored
    out = _apply_rule(forward, (query, key, value, decay, beta), states)
    out = meta.reshape(out, -1, linear.value)
    z = meta.reshape(z, -1, linear.value)
    out = gated_norm(forward, weights[f"{NAME}.norm.weight"], out, z)
    out = meta.reshape(out, batch, tokens, -1)
    output = project(forward, weights, f"{NAME}.out_proj", out)
    del products  # alive until here, as what went in is
    return output


def _convolve(forward: Forward, x: Tensor, weight: Tensor) -> Tensor:
    """(batch, channels, tokens) -> the same; while answers are sampled, over what the slots have
    of the tokens before, and what the last ones leave is stored."""
    slots, kernel = forward.slots, weight.shape[-1]
    if isinstance(slots, Decode):
        return step_convolution(x, slots.state((x.shape[1], kernel)), weight)
    if isinstance(slots, Prefill):
        slots.store_tail(x, kernel)
    return causal_convolution(x, weight)


def _apply_rule(forward: Forward, operands: Operands, states: list[Tensor]) -> Tensor:
    """(batch, tokens, value_heads, value); states: see `chunked_delta_rule`."""
    slots, a = forward.slots, forward.architecture
    if isinstance(slots, Decode):
        shape = a.linear.value_heads, a.linear.key, a.linear.value
        out, state = step_delta_rule(a, operands, slots.state(shape, "float32"))
        states.append(state)
        return out
    if not isinstance(slots, Prefill):
        return chunked_delta_rule(a, operands)
    out = chunked_delta_rule(a, operands, states)
    slots.store_state(states[0])
    return out


def find_decay(a: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """`-A_log.float().exp() * F.softplus(a.float() + dt_bias)`: (batch, tokens, heads), fp32."""
    rate = meta.negative(exp(meta.cast(a_log, "float32")))
    return meta.mul(rate, softplus(meta.add(meta.cast(a, "float32"), bias)))


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """(batch, channels, tokens) -> the same: each channel over its last tokens, then SiLU."""
    tokens, dtype = x.shape[2], x.dtype
    out = convolve(meta.cast(x, weight.dtype), weight, weight.shape[-1] - 1)
    out = meta.silu(meta.narrow(out, 2, 0, tokens))
    return meta.cast(out, dtype)


@module
def gated_norm(forward: Forward, weight: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm over a head of values, times SiLU of the gate."""
    dtype = x.dtype
    x = meta.cast(x, "float32")
    variance = meta.mean_last(meta.power(x))
    x = meta.mul(x, meta.rsqrt(meta.shift(variance)))
    x = meta.mul(weight, meta.cast(x, dtype))
    x = meta.mul(x, meta.silu(meta.cast(gate, "float32")))
    return meta.cast(x, dtype)


def _unit_length(x: Tensor) -> Tensor:
    """`x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)`."""
    inverse = meta.rsqrt(meta.shift(sum_last(meta.mul(x, x))))
    return meta.mul(x, inverse)


def _enter_rule(a: Architecture, operands: Operands) -> Operands:
    """What both forms of the rule begin with: heads first, in fp32, query and key of length 1."""
    query, key, value, decay, beta = operands
    repeats = a.linear.value_heads // a.linear.key_heads
    if repeats > 1:
        query = repeat_heads(query, repeats)
        key = repeat_heads(key, repeats)
    query, key, value, beta, decay = [
        cast_row_major(meta.transpose(x, 1, 2), "float32")
        for x in (query, key, value, beta, decay)
    ]  # fmt: skip
    query = _unit_length(query)
    key = _unit_length(key)
    query = meta.scale(query)
    return query, key, value, decay, beta


def chunked_delta_rule(
    a: Architecture, operands: Operands, states: list[Tensor] | None = None
) -> Tensor:
    """The rule over chunks of 64 tokens, `torch_chunk_gated_delta_rule`.

    operands: query, key, value (batch, tokens, heads, size), decay and beta (batch, tokens, heads)
    -> as value; fp32 within.
    states: receives the state after the last token, where a caller needs it.
    """
    dtype, tokens = operands[0].dtype, operands[0].shape[1]
    query, key, value, decay, beta = _enter_rule(a, operands)
    extra = chunks_of(tokens) * CHUNK - tokens
    query, key, value = [pad(x, 2, extra) for x in (query, key, value)]
    beta, decay = [pad(x, 2, extra) for x in (beta, decay)]
    v_beta = meta.mul(value, meta.unsqueeze(beta, 3))
    k_beta = meta.mul(key, meta.unsqueeze(beta, 3))
    query, key, k_beta, v_beta = [_cut(x) for x in (query, key, k_beta, v_beta)]
    decay = _cut(decay)
    mask = meta.empty(query.meter, (CHUNK, CHUNK), "bool")
    mask = meta.empty(query.meter, (CHUNK, CHUNK), "bool")  # `.triu(1)` of it
    summed = cumulative_sum(decay)
    pairwise = meta.subtract(meta.unsqueeze(summed, 4), meta.unsqueeze(summed, 3))
    pairwise = meta.fill_masked(pairwise, mask)
    pairwise = exp(pairwise)
    system = meta.mul(matmul(k_beta, meta.transpose(key, 3, 4)), pairwise)
    intra = meta.mul(matmul(query, meta.transpose(key, 3, 4)), pairwise)
    decayed = meta.mul(k_beta, meta.unsqueeze(exp(summed), 4))
    new_values = solve_triangular(system, v_beta)
    k_summed = solve_triangular(system, decayed)
    heads = (query.shape[0], a.linear.value_heads)
    state = meta.empty(query.meter, (*heads, a.linear.key, a.linear.value), "float32")
    out = meta.empty(query.meter, new_values.shape, "float32", strides=new_values.strides)
    query = meta.mul(query, meta.unsqueeze(exp(summed), 4))
    key = meta.mul(key, meta.unsqueeze(exp(_left(summed)), 4))
    last = meta.unsqueeze(meta.unsqueeze(exp(meta.select(summed, 3)), 3), 4)
    held, found = [state], [out]
    del state, out  # the scan lets them go as it renews them
    alive = _scan(Scanned(new_values, k_summed, query, intra, key, last), held, found)
    if states is not None:
        states.append(held.pop())
    held.clear()
    out = meta.reshape(found.pop(), *heads, -1, a.linear.value)
    out = meta.narrow(out, 2, 0, tokens) if extra else out  # `out[:, :, :all]` is out itself
    out = cast_row_major(meta.transpose(out, 1, 2), dtype)
    del alive  # the last turn's variables
    return out


def step_convolution(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """`causal_conv1d_update`: (rows, channels, 1) behind the state's tokens -> the same."""
    joined = meta.cast(meta.concatenate((state, x), 2), weight.dtype)
    out = convolve(joined, weight, 0)
    out = meta.silu(meta.narrow(out, 2, out.shape[2] - 1, 1))
    return meta.cast(out, x.dtype)


def step_delta_rule(a: Architecture, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for one token, `torch_recurrent_gated_delta_rule`, without a gradient.

    operands, and what it returns first: as of `chunked_delta_rule`; state: (rows, value_heads, key,
    value), and the new one behind it.
    """
    dtype = operands[0].dtype
    query, key, value, decay, beta = _enter_rule(a, operands)
    out = like(value)
    q_t, k_t = (meta.unsqueeze(meta.select(x, 2), 3) for x in (query, key))
    decay = exp(meta.select(decay, 2))
    state = meta.mul(state, meta.unsqueeze(meta.unsqueeze(decay, 2), 3))
    predicted = _sum_keys(meta.mul(state, k_t))
    delta = meta.mul(
        meta.subtract(meta.select(value, 2), predicted), meta.unsqueeze(meta.select(beta, 2), 2)
    )
    state = meta.add(state, meta.mul(k_t, meta.unsqueeze(delta, 2)))
    _sum_keys(meta.mul(state, q_t))
    out = cast_row_major(meta.transpose(out, 1, 2), "float32")
    return meta.cast(out, dtype), state


def _sum_keys(x: Tensor) -> Tensor:
    """`x.sum(-2)`."""
    return meta.empty(x.meter, (*x.shape[:-2], x.shape[-1]), x.dtype)


def _cut(x: Tensor) -> Tensor:
    """(batch, heads, tokens, …) -> (batch, heads, chunks, 64, …)."""
    batch, heads, tokens, *rest = x.shape
    return meta.reshape(x, batch, heads, tokens // CHUNK, CHUNK, *rest)


def _left(summed: Tensor) -> Tensor:
    """How much decay is left behind each position of a chunk."""
    return meta.subtract(meta.narrow(summed, 3, CHUNK - 1, 1), summed)


class Scanned(NamedTuple):
    """What the scan reads, a chunk in each turn."""

    new_values: Tensor
    k_summed: Tensor
    query: Tensor
    intra: Tensor
    key: Tensor
    last: Tensor


def _scan(read: Scanned, held: list[Tensor], found: list[Tensor]) -> tuple[Tensor, ...]:
    """The scan over chunks, in which each turn fills its part of `found` and renews the state.

    held, found: the last references to the first state, in whose place the last one is left, and
    to what is filled. Returns what the last turn's variables hold.

    Of many turns five run. The second stands for all but the others, as far as its saved tensors
    go; the two behind it, whose states are their own, are the first that a backward meets as they
    are in every turn.
    """
    state, meter = held.pop(), found[0].meter
    count = read.new_values.shape[2]
    shortened = count > TURNS and not meter.unrolled
    v_new: Tensor | None = None
    inter: Tensor | None = None
    for index in range(TURNS if shortened else count):
        middle = shortened and index == 1
        many = count - TURNS + 1 if middle and _keeps(meter, read) else 1
        with meter.standing_for(many, gradients=1):
            v_new = meta.subtract(
                meta.select(read.new_values, 2), matmul(meta.select(read.k_summed, 2), state)
            )
            inter = matmul(meta.select(read.query, 2), state)
            found.append(_fill(found.pop(), _attend(read, inter, v_new)))
            state = _renew(read, state, v_new)
        if middle:  # of those that it stands for, only what is saved is left
            v_new = inter = None
    held.append(state)
    return tuple(x for x in (v_new, inter) if x is not None)


def _attend(read: Scanned, inter: Tensor, v_new: Tensor) -> Tensor:
    return meta.add(inter, matmul(meta.select(read.intra, 2), v_new))


def _renew(read: Scanned, state: Tensor, v_new: Tensor) -> Tensor:
    """The state of the next turn: decayed, and with this chunk's keys and values in it."""
    decayed = meta.mul(state, meta.select(read.last, 2))
    turned = meta.transpose(meta.select(read.key, 2), 2, 3)
    return meta.add(decayed, matmul(turned, v_new))


def _fill(whole: Tensor, part: Tensor) -> Tensor:
    """`whole[:, :, i] = part`."""
    return meta.fill_part(whole, part)


def _keeps(meter: Meter, read: Scanned) -> bool:
    """Whether turns leave saved tensors behind: not without a gradient, and not in the first
    forward of what is recomputed."""
    promises = isinstance(meter.saver, Region) and meter.saver.filled < 0
    return meter.graph and not promises and any(x.requires_grad for x in read)
