"""Scaled dot-product attention, kernel by kernel, causal and without a mask."""

from __future__ import annotations

from memfit.sizes.autograd import Gradients, Node, record
from memfit.sizes.elementwise import Incoming, attach, autocast_lower, like, upstream
from memfit.sizes.tensor import Tensor, empty
from memfit.sizes.views import transpose


def attention(kernel: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`F.scaled_dot_product_attention`: (batch, heads, tokens, size); key, value may be grouped."""
    low = [autocast_lower(x) for x in (value, key, query)]  # C++ evaluates the last first
    low.reverse()
    with query.meter.with_autocast(False):
        if kernel == "flash":
            return _flash(*low)
        raise NotImplementedError(kernel)


def _by_token(meter_of: Tensor, like: Tensor) -> Tensor:
    """A new tensor of like's shape that lies in memory as (batch, tokens, heads, size)."""
    batch, heads, tokens, size = like.shape
    strides = (tokens * heads * size, size, heads * size, 1)
    return empty(meter_of.meter, like.shape, like.dtype, strides=strides)


def _count(query: Tensor, key: Tensor, products: float) -> None:
    """FLOPs of causal attention: half of a dense (tokens x tokens) matrix for each product."""
    batch, heads, tokens, size = query.shape
    query.meter.flop += int(products * batch * heads * tokens * key.shape[2] * size)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One kernel: saves its inputs, its result and a row of log-sums for each head."""
    meter = query.meter
    node = record(_flash_backward, (query, key, value), (query, key, value))
    out = attach(node, like(query))
    log_sums = empty(meter, query.shape[:3], "float32")
    _count(query, key, 2)
    if node is not None:
        node.saved = [*node.saved, meter.pack(log_sums), meter.pack(out)]
    return out


def _flash_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    query, key, value, *results = [node.unpack(i) for i in range(5)]
    _count(query, key, 5)
    made = [_by_token(grad, x) for x in (query, key, value)]
    del results  # as long as the kernel runs
    return made


def by_document(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, documents: tuple[tuple[int, ...], ...]
) -> Tensor:
    """One call of the kernel for each document of each row, joined again."""
    raise NotImplementedError


__all__ = ["attention", "by_document", "transpose"]
