"""Attention with sinks, as train/model/sinks.py writes it out."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import (
    Incoming,
    add,
    attach,
    cast,
    fill_masked_in_place,
    like,
    scale,
    softmax,
    upstream,
)
from memfit.meta.pieces import expand
from memfit.meta.products import multiply_heads
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import concatenate, expand_heads, narrow, reshape, transpose


def attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """(batch, heads, tokens, size), key and value with kv_heads, sinks (heads) -> as query."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = expand_heads(key, groups), expand_heads(value, groups)
    rows, heads, tokens, keys = *query.shape[:3], key.shape[2]
    scores = multiply_heads(scale(query), transpose(key, 2, 3))
    hidden = _hidden(scores)
    scores = fill_masked_in_place(scores, hidden)
    column = expand(reshape(cast(sinks, scores.dtype), 1, -1, 1, 1), rows, heads, tokens, 1)
    joined = concatenate((scores, column), 3)
    wide = softmax(cast(joined, "float32"))
    weights = cast(narrow(wide, 3, 0, keys), value.dtype)
    del wide
    return multiply_heads(weights, value)


def attend_beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor
) -> Tensor:
    """As Hugging Face's eager class writes it: the softmax in the dtype of the scores."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = expand_heads(key, groups), expand_heads(value, groups)
    rows, heads, tokens, keys = *query.shape[:3], key.shape[2]
    scores = scale(multiply_heads(query, transpose(key, 2, 3)))
    scores = add(scores, mask)
    column = expand(reshape(sinks, 1, -1, 1, 1), rows, heads, tokens, 1)
    joined = subtract_largest(concatenate((scores, column), 3))
    chances = softmax(joined)
    weights = cast(narrow(chances, 3, 0, keys), value.dtype)
    return multiply_heads(weights, value)


def subtract_largest(x: Tensor) -> Tensor:
    """`x - x.max(dim=-1, keepdim=True).values`: its gradient's two parts are joined in a third."""
    places = empty(x.meter, (*x.shape[:-1], 1), "int64")
    node = record(_subtract_largest_backward, (x,), (places,))
    empty(x.meter, places.shape, x.dtype)
    return attach(node, like(x))


def _subtract_largest_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    like(grad)  # its negative, of which rows are summed
    back = like(grad)
    return (add(grad.detached(), back.detached()),)


def _hidden(scores: Tensor) -> Tensor:
    shape = scores.shape[2:]
    ones = empty(scores.meter, shape, "bool")
    after = empty(scores.meter, shape, "bool")
    before = empty(scores.meter, shape, "bool")
    del ones, before
    return after
