"""Attention over documents that lie end to end, in one call: what train/model/varlen.py holds."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.meta.autograd import Gradients, Node, must_save, record
from memfit.meta.elementwise import Incoming, attach, autocast_lower, like, upstream
from memfit.meta.tensor import Tensor, empty, workspace
from memfit.meta.views import narrow, pad_last, reshape, transpose
from memfit.meta.workspace import varlen_backward
from memfit.records.model import DTYPE_BYTES


def make_starts(like: Tensor, documents: Sequence[int] | None) -> Tensor:
    """Where each document of all rows begins, and the end: (documents + 1,) int32.

    like: (batch, tokens); documents: of a row, the same in every row; None is one.
    """
    count = like.shape[0] * (1 if documents is None else len(documents))
    return empty(like.meter, (count + 1,), "int32")


def end_to_end(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """`varlen_attn`: (batch, heads, tokens, size), key and value grouped -> (batch, tokens, heads,
    the value's size)."""
    rows, heads, tokens, size = query.shape
    width = value.shape[-1]
    if width < size:
        value = pad_last(value, size - width)
    query, key, value = (_flat(autocast_lower(x)) for x in (query, key, value))
    out = _run(query, key, value, starts)
    if width < size:
        out = narrow(out, 2, 0, width)
    return reshape(out, rows, tokens, heads, width)


def _flat(x: Tensor) -> Tensor:
    """(batch, heads, tokens, size) -> (batch * tokens, heads, size)."""
    rows, heads, tokens, size = x.shape
    return reshape(transpose(x, 1, 2), rows * tokens, heads, size)


def _run(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """The operator: saves its inputs, the starts twice, its result, a row of log-sums for each
    head and a state of the random generator that it does not use.
    """
    meter = query.meter
    node = record(_backward, (query, key, value))

    def run() -> tuple[Tensor, ...]:
        sums = empty(meter, (query.shape[1], query.shape[0]), "float32")
        return like(query), sums, empty(meter, (2,), "int64")

    out, sums, state = must_save(meter, run)
    attach(node, out)
    if node is not None:
        saved = (query, key, value, starts, starts, out, sums, state)
        node.saved = [meter.pack(x) for x in saved]
    return out


def _backward(node: Node, grads: Incoming) -> Gradients:
    out = upstream(grads)
    meter = out.meter
    tokens, heads, _ = out.shape
    # autograd gives a gradient of zeros to what nobody derives by
    zeros = empty(meter, (heads, tokens), "float32"), empty(meter, (2,), "int64")
    unpacked = [node.unpack(i) for i in range(len(node.saved))]
    query, key, value, starts = unpacked[:4]
    documents = starts.shape[0] - 1
    width = DTYPE_BYTES[query.dtype]
    made = [like(x) for x in (query, key, value)]
    workspace(meter, *varlen_backward(query.shape, key.shape, documents, width))
    del zeros
    return made
