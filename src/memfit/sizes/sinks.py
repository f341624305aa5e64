"""Attention with sinks, as train/sinks.py writes it out."""

from __future__ import annotations

from memfit.sizes.elementwise import cast, fill_masked_in_place, scale, softmax
from memfit.sizes.pieces import expand
from memfit.sizes.products import multiply_heads
from memfit.sizes.tensor import Tensor, empty
from memfit.sizes.views import concatenate, expand_heads, narrow, reshape, transpose


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


def _hidden(scores: Tensor) -> Tensor:
    shape = scores.shape[2:]
    ones = empty(scores.meter, shape, "bool")
    after = empty(scores.meter, shape, "bool")
    before = empty(scores.meter, shape, "bool")
    del ones, before
    return after
