"""Lean norm, gated product and linear: what `train/lean/functions.py` saves and allocates.

What an autograd function saves is handed to a recomputed region after its forward has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.sizes.autograd import Gradients, Node, record, sum_to
from memfit.sizes.elementwise import Incoming, attach, autocast_lower, cast, like, upstream
from memfit.sizes.products import linear as plain_linear
from memfit.sizes.products import multiply
from memfit.sizes.tensor import Tensor, empty
from memfit.sizes.views import reshape, transpose, view

Remake = Callable[..., Tensor]


class Shared:
    """One tensor made again for all products that want it; see train/lean/made.py."""

    __slots__ = ("_asked", "_value", "wanted")

    def __init__(self) -> None:
        self.wanted = 0
        self._asked = 0
        self._value: Tensor | None = None

    def take(self, remake: Remake, parts: list[Tensor], dtype: str) -> Tensor:
        """The tensor in the dtype of the products."""
        value = self._value
        if value is None:
            value = cast(remake(*parts), dtype)
        self._asked += 1
        last = self._asked % self.wanted == 0
        self._value = None if last else value
        return value


class Made(NamedTuple):
    """A tensor's parts and how they become the tensor."""

    remake: Remake
    parts: tuple[Tensor, ...]
    shared: Shared


def _take(grads: Incoming) -> Tensor:
    """The gradient, which a function in Python gives up as it returns, before results are cast."""
    grad = upstream(grads)
    grads[0] = None
    return grad


def _normalise(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    wide = like(x, inverse, shape=x.shape)
    return like(weight, cast(wide, x.dtype), shape=x.shape)


def rms_norm(x: Tensor, weight: Tensor, *, feeds: bool) -> Tensor:
    """(..., hidden) -> (..., hidden): saves x and one number a row.

    feeds: whether products read the output itself, and not a view of it.
    """
    low, plain = x.detached(), weight.detached()
    inverse = _inverse(low)
    node = record(_rms_norm_backward, (x, weight))
    out = _normalise(low, inverse, plain)
    if node is not None:
        meter = x.meter
        node.saved = [meter.pack(x), meter.pack(inverse), meter.pack(weight)]
    attach(node, out)
    if feeds:
        out.made = Made(_normalise, (low, inverse, plain), Shared())
    return out


def _inverse(x: Tensor) -> Tensor:
    wide = cast(x, "float32")
    squares = like(wide)
    means = empty(x.meter, (*x.shape[:-1], 1), "float32")
    del squares
    return means


def _rms_norm_backward(node: Node, grads: Incoming) -> Gradients:
    x, inverse, weight = (node.unpack(i) for i in range(3))
    grad = _take(grads)
    wide = like(x, inverse, shape=x.shape)
    d_x = d_weight = None
    if node.needs(1):
        d_weight = sum_to(like(grad, wide), weight.shape)
    if node.needs(0):
        slope = _times(grad, cast(weight, wide.dtype))
        product = like(slope, wide)
        means = empty(x.meter, inverse.shape, wide.dtype)
        del product
        del means
        d_x = cast(slope, x.dtype)
    return d_x, d_weight


def _times(x: Tensor, row: Tensor) -> Tensor:
    return like(x, row, shape=x.shape)


def _gate(gates: Tensor, up: Tensor) -> Tensor:
    return like(gates)


def gated_product(gates: Tensor, up: Tensor) -> Tensor:
    """silu(gates) * up: saves both."""
    node = record(_gated_product_backward, (gates, up))
    out = _gate(gates, up)
    if node is not None:
        node.saved = [gates.meter.pack(gates), up.meter.pack(up)]
    attach(node, out)
    out.made = Made(_gate, (gates.detached(), up.detached()), Shared())
    return out


def _gated_product_backward(node: Node, grads: Incoming) -> Gradients:
    gates, up = node.unpack(0), node.unpack(1)
    grad = _take(grads)
    d_up = like(gates) if node.needs(1) else None
    d_gates = None
    if node.needs(0):
        bent = like(grad, up)
        d_gates = like(bent, gates)
        del bent
    return d_gates, d_up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., columns) x (rows, columns) -> (..., rows): saves the weight and what x was made of."""
    made = x.made
    low = autocast_lower(x.detached())
    node = record(_linear_backward(made), (x, weight, bias))
    out = plain_linear(low, weight.detached(), None if bias is None else bias.detached())
    if node is not None:
        saved = [weight] if node.needs(0) else []
        if node.needs(1) and made is None:
            saved.append(low)
        elif node.needs(1) and made is not None:
            saved += made.parts
            made.shared.wanted += 1
        node.saved = [x.meter.pack(t) for t in saved]
    return attach(node, out)


def _linear_backward(made: Made | None) -> Callable[[Node, Incoming], Gradients]:
    remake, shared = (None, None) if made is None else (made.remake, made.shared)

    def rule(node: Node, grads: Incoming) -> Gradients:
        saved = [node.unpack(i) for i in range(len(node.saved))]
        weight = saved.pop(0) if node.needs(0) else None
        grad = _take(grads)
        flat = reshape(grad, -1, grad.shape[-1])
        d_x = d_weight = None
        if node.needs(1):
            x = saved[0]
            if remake is not None and shared is not None:
                x = shared.take(remake, saved, grad.dtype)
            d_weight = multiply(transpose(flat, 0, 1), reshape(x, -1, x.shape[-1]))
            del x
        if weight is not None:
            rows = multiply(flat, cast(weight, grad.dtype))
            d_x = view(rows, *grad.shape[:-1], weight.shape[1])
        d_bias = None
        if node.needs(2):
            d_bias = sum_to(flat, (flat.shape[-1],))
        return d_x, d_weight, d_bias

    return rule
