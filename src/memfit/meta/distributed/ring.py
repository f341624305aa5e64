"""What ranks that share a row's tokens allocate in attention: torch's ring, with sizes only.

Written as `_templated_ring_attention` and its backward run (torch 2.13:
torch/distributed/tensor/experimental/_context_parallel/_attention.py), by way of
train/distributed/ring.py:
keys and values of all ranks are gathered, one call of the flash kernel a rank, results joined in
fp32. A rank's first call is of its own tokens; while the others' came before its own, it sees half
of them, and once they come after, half of its own tokens do. Names are those of torch's variables
where one keeps a tensor alive.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.meta.attending.attention import by_token
from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, like, upstream
from memfit.meta.tensor import Tensor, empty, row_major, workspace
from memfit.meta.views import concatenate, contiguous, narrow
from memfit.meta.workspace import copied_by_token, flash_backward
from memfit.records.model import DTYPE_BYTES

WIDE = "float32"
TOKENS = 2  # the dimension of (batch, heads, tokens, head_dim)


class Ring(NamedTuple):
    """Ranks that share the tokens of a row, and which of them this is."""

    ranks: int
    place: int


class _Part(NamedTuple):
    """What a call of the kernel gives."""

    out: Tensor
    sums: Tensor  # (batch, heads, tokens) fp32
    random: tuple[Tensor, ...]  # CUDA's generator


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """(batch, heads, own tokens, head_dim) -> the same; key and value may have fewer heads."""
    node = record(_backward(ring), (query, key, value), (query, key, value))
    out, sums, random = _forward(query.detached(), key.detached(), value.detached(), ring)
    attach(node, out)
    if node is not None:
        node.saved = [*node.saved, *(query.meter.pack(x) for x in (out, sums, *random))]
    return out


def _forward(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> _Part:
    key, value = contiguous(key), contiguous(value)
    gathered = _gather(_join(key, value), ring)
    merged: list[Tensor] = []
    for i in range(ring.ranks):
        if i > 0:
            key, value = _views(gathered, key, value)
        if 0 < i < ring.ranks - 1:
            _join(key, value)  # and not sent
        partial = i > ring.place
        if i == 0:
            q, k, v = query, key, value
        elif not partial:
            q, k, v = query, _half(key), _half(value)
        else:
            q, k, v = _half(query), key, value
        part = _call(q, k, v)
        _merge(merged, part, partial=partial)
    del k, v  # held until here
    return _Part(cast(merged[0], query.dtype), merged[1], part.random)


def _half(x: Tensor) -> Tensor:
    return narrow(x, TOKENS, 0, x.shape[TOKENS] // 2)


def _join(key: Tensor, value: Tensor) -> Tensor:
    """`torch.cat([key.flatten(), value.flatten()])`."""
    flat = contiguous(key), contiguous(value)
    return empty(key.meter, (sum(x.numel for x in flat),), key.dtype)


def _gather(sent: Tensor, ring: Ring) -> Tensor:
    return empty(sent.meter, (ring.ranks * sent.numel,), sent.dtype)


def _views(buffer: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one rank in a buffer."""
    made = (buffer.viewed(x.shape, row_major(x.shape)) for x in (key, value))
    return next(made), next(made)


def _call(query: Tensor, key: Tensor, value: Tensor) -> _Part:
    meter = query.meter
    out, sums = like(query), empty(meter, query.shape[:3], WIDE)
    random = (empty(meter, (2,), "int64"), empty(meter, (), "int64")) if meter.cuda else ()
    return _Part(out, sums, random)


def _merge(merged: list[Tensor], part: _Part, *, partial: bool) -> None:
    """Join results by their log-sums, which are (batch, heads, tokens, 1).

    merged: both, of the calls before; none at first. partial: the second half of the tokens alone.
    """
    block = cast(part.out, WIDE)
    block_sums = part.sums.viewed((*part.sums.shape, 1), (*part.sums.strides, 1))
    if not merged:
        merged += block, block_sums
        return
    out, sums = (_half(x) for x in merged) if partial else merged
    weight = _through(like(block_sums, sums))
    apart = like(out, block)
    change = like(weight, apart, shape=apart.shape)
    del weight, apart
    out = like(out, change)
    del change
    sums = like(sums, _through(like(sums, block_sums), scratch=not sums.meter.cuda))
    if not partial:
        merged[:] = out, sums
        return
    merged[1] = concatenate((_half(merged[1]), sums), TOKENS)  # the earlier ones go before
    merged[0] = concatenate((_half(merged[0]), out), TOKENS)


def _through(x: Tensor, *, scratch: bool = False) -> Tensor:
    """A function of x, which nobody else has; scratch: the CPU's logsigmoid has a buffer."""
    out = like(x)
    if scratch:
        like(x)
    return out


def _backward(ring: Ring) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return _gradients([upstream(grads), *(node.unpack(i) for i in range(5))], ring)

    return rule


def _gradients(tensors: list[Tensor], ring: Ring) -> Gradients:
    """Return gradients of query, key and value; tensors: the result's gradient and the saved."""
    grad, query, key, value, out, sums = tensors
    dtype, meter = key.dtype, key.meter
    of_query, of_key, of_value = (like(x, dtype=WIDE) for x in (query, key, value))
    key, value = contiguous(key), contiguous(value)
    next_kv = _join(key, value)
    gathered = _gather(next_kv, ring)
    received: Tensor | None = None
    lse: Tensor | None = None
    for i in range(ring.ranks):
        if i > 0:
            key, value = _views(gathered, key, value)
        if 0 < i < ring.ranks - 1:
            next_kv = _join(key, value)
        partial = i > ring.place
        q, k, v, read = query, key, value, (grad, out)
        if partial:
            q, lse = _half(query), empty(meter, _halved(sums), WIDE)
            read = _half(grad), _half(out)
        elif i:
            k, v = _half(key), _half(value)
        made = _call_backward(q, k, v, read)
        if received is not None:
            next_grad = received
            of_key, of_value = _views(received, key, value)
            if not partial:
                of_key, of_value = _add_half(of_key), _add_half(of_value)
        next_grad = _join(of_key, of_value)
        received = like(next_grad)
        if partial:
            of_query = _add_half(of_query)
    assert received is not None
    of_query = cast(of_query, query.dtype)
    next_grad = cast(received, dtype)
    of_key, of_value = _views(next_grad, key, value)
    del made, next_kv, lse, q, k, v, read  # held until here
    return of_query, of_key, of_value


def _halved(sums: Tensor) -> tuple[int, ...]:
    return (*sums.shape[:2], sums.shape[2] // 2)


def _add_half(x: Tensor) -> Tensor:
    """A half of the tokens added to: both are joined anew."""
    return concatenate((_half(x), _half(x)), TOKENS)


def _call_backward(
    query: Tensor, key: Tensor, value: Tensor, read: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """read: the result's gradient and the result."""
    if not query.meter.cuda:
        return [by_token(x) for x in (query, key, value)]
    made = [like(x) for x in (query, key, value)]
    width = DTYPE_BYTES[query.dtype]
    copies = [copied_by_token(x.shape, x.strides, width) for x in read]
    workspace(query.meter, *copies, *flash_backward(query.shape, key.shape, width))
    return made
