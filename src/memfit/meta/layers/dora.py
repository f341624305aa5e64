"""DoRA's part of an adapted projection, as `adapters/dora.py` computes it."""

from __future__ import annotations

from collections.abc import Callable

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, add, attach, like, mul, negative, scale, upstream
from memfit.meta.products import multiply
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import transpose


def rescale(
    result: Tensor,
    base: tuple[Tensor, Tensor | None],
    pair: tuple[Tensor, Tensor],
    magnitude: Tensor,
    make_added: Callable[[], Tensor],
) -> Tensor:
    """(result + s * added) * ratio, and what the bias loses thereby.

    base: weight and bias; pair: A (rank, in) and B (out, rank); make_added: what the adapter adds.
    """
    ratio = _divide(magnitude, _row_norms(base[0], *pair))
    added = make_added()
    total = add(result, scale(added))
    del added
    scaled = mul(total, ratio)
    bias = base[1]
    return scaled if bias is None else add(scaled, mul(negative(ratio), bias))


def _row_norms(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """(out): without a gradient and without autocast."""
    down, up = down.detached(), up.detached()
    scaled = like(up)
    if weight.shape[0] == scaled.shape[0]:
        merged = multiply(scaled, down)
    else:  # stored (in, out)
        merged = multiply(transpose(down, 0, 1), transpose(scaled, 0, 1))
    del scaled
    return empty(weight.meter, (up.shape[0],), merged.dtype)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`, b without a gradient."""
    return attach(record(_divide_backward, (a,), (b,)), like(a, b))


def _divide_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(upstream(grads), node.unpack(0)),)
