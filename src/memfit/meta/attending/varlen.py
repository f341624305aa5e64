"""Attention over documents that lie end to end, in one call: what train/model/varlen.py holds."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.meta.autograd import Gradients, Node, Rule, must_save, record
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


def end_to_end(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, documents: Sequence[int] | None
) -> Tensor:
    """`varlen_attn`: (batch, heads, tokens, size), key and value grouped -> (batch, tokens, heads,
    the value's size)."""
    rows, heads, tokens, size = query.shape
    width = value.shape[-1]
    if width < size:
        value = pad_last(value, size - width)
    query, key, value = (_flat(autocast_lower(x)) for x in (query, key, value))
    squares = sum(n * n for n in documents or (tokens,))
    out = _run(query, key, value, starts, rows * squares)
    if width < size:
        out = narrow(out, 2, 0, width)
    return reshape(out, rows, tokens, heads, width)


def _flat(x: Tensor) -> Tensor:
    """(batch, heads, tokens, size) -> (batch * tokens, heads, size)."""
    rows, heads, tokens, size = x.shape
    return reshape(transpose(x, 1, 2), rows * tokens, heads, size)


def _run(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, squares: int) -> Tensor:
    """The operator: saves its inputs, the starts twice, its result, a row of log-sums for each
    head and a state of the random generator that it does not use.

    squares: of documents' lengths, summed; causal attention's FLOP are half of them.
    """
    meter = query.meter
    node = record(_backward(squares), (query, key, value))

    def run() -> tuple[Tensor, ...]:
        _count(query, squares, 2)
        sums = empty(meter, (query.shape[1], query.shape[0]), "float32")
        return like(query), sums, empty(meter, (2,), "int64")

    out, sums, state = must_save(meter, run)
    attach(node, out)
    if node is not None:
        saved = (query, key, value, starts, starts, out, sums, state)
        node.saved = [meter.pack(x) for x in saved]
    return out


def _count(query: Tensor, squares: int, products: int) -> None:
    _, heads, size = query.shape
    query.meter.flop += products * size * heads * squares * query.meter.copies


def _backward(squares: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        out = upstream(grads)
        meter = out.meter
        tokens, heads, _ = out.shape
        # autograd gives a gradient of zeros to what nobody derives by
        zeros = empty(meter, (heads, tokens), "float32"), empty(meter, (2,), "int64")
        unpacked = [node.unpack(i) for i in range(len(node.saved))]
        query, key, value, starts = unpacked[:4]
        _count(query, squares, 5)
        documents = starts.shape[0] - 1
        width = DTYPE_BYTES[query.dtype]
        inside = workspace(meter, varlen_backward(query.shape, key.shape, documents, width))
        made = [like(x) for x in (query, key, value)]
        del inside, zeros
        return made

    return rule
