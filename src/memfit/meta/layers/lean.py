"""Lean norms, activations and linear: what the functions of `train/lean` save and allocate.

What an autograd function saves is handed to a recomputed region after its forward has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.meta.autograd import Gradients, Node, Rule, record, sum_to
from memfit.meta.elementwise import (
    WIDTH,
    Incoming,
    attach,
    autocast_lower,
    cast,
    layer_norm_slopes,
    like,
    upstream,
)
from memfit.meta.products import linear as plain_linear
from memfit.meta.products import multiply
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import reshape, transpose, view

Remake = Callable[..., Tensor]


class Shared:
    """One tensor recomputed once for all products that read it; see train/lean/made.py."""

    __slots__ = ("_uses", "_value", "wanted")

    def __init__(self) -> None:
        self.wanted = 0
        self._uses = 0
        self._value: Tensor | None = None

    def take(self, remake: Remake, parts: list[Tensor | None], dtype: str) -> Tensor:
        """The tensor in the dtype of the products."""
        value = self._value
        if value is None:
            value = cast(remake(*parts), dtype)
        self._uses += 1
        last = self._uses % self.wanted == 0
        self._value = None if last else value
        return value


class Made(NamedTuple):
    """A tensor's parts and how they become the tensor."""

    remake: Remake
    parts: tuple[Tensor | None, ...]
    shared: Shared


def _take(grads: Incoming) -> Tensor:
    """The gradient, which a function in Python gives up as it returns, before results are cast."""
    grad = upstream(grads)
    grads[0] = None
    return grad


def normalise(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Rounded before the weight, as Llama's."""
    wide = like(x, inverse, shape=x.shape)
    return like(weight, cast(wide, x.dtype), shape=x.shape)


def normalise_wide(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Rounded after the weight, as OLMo 2's."""
    wide = like(x, inverse, shape=x.shape)
    return cast(like(weight, wide, shape=x.shape), x.dtype)


def normalise_unit(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a norm's weight that is stored minus 1, as Gemma's."""
    wide = like(x, inverse, shape=x.shape)
    return cast(_times(wide, _more(weight, wide.dtype)), x.dtype)


def _more(weight: Tensor, dtype: str) -> Tensor:
    """`1 + weight.to(dtype)`."""
    return like(cast(weight, dtype))


def rms_norm(x: Tensor, weight: Tensor, remake: Remake = normalise, *, feeds: bool) -> Tensor:
    """(..., hidden) -> (..., hidden): saves x and one number a row.

    remake: one of `normalise…`; feeds: whether products read the output itself, and not a view.
    """
    low, plain = x.detached(), weight.detached()
    inverse = _inverse(low)
    node = record(_rms_norm_backward(remake is normalise_unit), (x, weight))
    out = remake(low, inverse, plain)
    if node is not None:
        meter = x.meter
        node.saved = [meter.pack(x), meter.pack(inverse), meter.pack(weight)]
    attach(node, out)
    if feeds:
        out.made = Made(remake, (low, inverse, plain), Shared())
    return out


def _inverse(x: Tensor) -> Tensor:
    wide = cast(x, "float32")
    squares = like(wide)
    means = empty(x.meter, (*x.shape[:-1], 1), "float32")
    del squares
    return means


def _rms_norm_backward(unit: bool) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        x, inverse, weight = (node.unpack(i) for i in range(3))
        grad = _take(grads)
        wide = like(x, inverse, shape=x.shape)
        d_x = d_weight = None
        if node.needs(1):
            d_weight = sum_to(like(grad, wide), weight.shape)
        if node.needs(0):
            factor = cast(weight, wide.dtype)
            slope = _times(grad, like(factor) if unit else factor)
            product = like(slope, wide)
            means = empty(x.meter, inverse.shape, wide.dtype)
            del product
            del means
            d_x = cast(slope, x.dtype)
        return d_x, d_weight

    return rule


def _times(x: Tensor, row: Tensor) -> Tensor:
    return like(x, row, shape=x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, feeds: bool) -> Tensor:
    """(..., hidden) -> (..., hidden): saves x and two numbers a row."""
    parts = x.detached(), weight.detached(), None if bias is None else bias.detached()
    node = record(_layer_norm_backward, (x, weight, bias))
    out, mean, deviation = _normalise_rows(*parts)
    if node is not None:
        saved = (x, weight, bias, mean, deviation)
        node.saved = [None if t is None else x.meter.pack(t) for t in saved]
    attach(node, out)
    if feeds:
        out.made = Made(lambda *parts: _normalise_rows(*parts)[0], parts, Shared())
    return out


def _normalise_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, means and deviations, in the wider dtype of x and weight."""
    dtype = max(x.dtype, weight.dtype, key=WIDTH.__getitem__)
    wide, factor = cast(x, dtype), cast(weight, dtype)
    shift = None if bias is None else cast(bias, dtype)
    out, row = like(wide), (*x.shape[:-1], 1)
    statistics = "float32" if x.meter.cuda else dtype
    mean, deviation = empty(x.meter, row, statistics), empty(x.meter, row, statistics)
    del factor, shift  # alive until here
    return out, mean, deviation


def _layer_norm_backward(node: Node, grads: Incoming) -> Gradients:
    x, weight, bias = (None if s is None else node.unpack(i) for i, s in enumerate(node.saved[:3]))
    grad = _take(grads)
    inputs = [None if t is None else cast(t, grad.dtype) for t in (x, weight, bias)]
    return layer_norm_slopes(node, inputs)


def activation(x: Tensor) -> Tensor:
    """Return the activation of x; saves x alone, and products that read the result recompute it."""
    node = record(_activation_backward, (x,))
    out = like(x)
    if node is not None:
        node.saved = [x.meter.pack(x)]
        out.made = Made(like, (x.detached(),), Shared())
    return attach(node, out)


def _activation_backward(node: Node, grads: Incoming) -> Gradients:
    x, grad = node.unpack(0), _take(grads)
    return (like(grad, x),)


def _gate(gates: Tensor, up: Tensor) -> Tensor:
    return like(gates)


def gated_product(gates: Tensor, up: Tensor) -> Tensor:
    """An activation of the gates times up: saves both."""
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, turned: bool = False) -> Tensor:
    """(..., columns) x (rows, columns) -> (..., rows): saves the weight and what x was made of.

    turned: the weight is (columns, rows).
    """
    made = x.made
    low = autocast_lower(x.detached())
    node = record(_linear_backward(made, turned), (x, weight, bias))
    plain = transpose(weight.detached(), 0, 1) if turned else weight.detached()
    out = plain_linear(low, plain, None if bias is None else bias.detached())
    if node is not None:
        saved: list[Tensor | None] = [weight] if node.needs(0) else []
        if node.needs(1) and made is None:
            saved.append(low)
        elif node.needs(1) and made is not None:
            saved += made.parts
            made.shared.wanted += 1
        node.saved = [None if t is None else x.meter.pack(t) for t in saved]
    return attach(node, out)


def _linear_backward(made: Made | None, turned: bool) -> Rule:
    remake, shared = (None, None) if made is None else (made.remake, made.shared)

    def rule(node: Node, grads: Incoming) -> Gradients:
        saved = [None if s is None else node.unpack(i) for i, s in enumerate(node.saved)]
        weight = saved.pop(0) if node.needs(0) else None
        grad = _take(grads)
        flat = reshape(grad, -1, grad.shape[-1])
        d_x = d_weight = None
        if node.needs(1):
            x = saved[0]
            if remake is not None and shared is not None:
                x = shared.take(remake, saved, grad.dtype)
            assert x is not None
            rows = reshape(x, -1, x.shape[-1])
            left, right = (rows, flat) if turned else (flat, rows)
            d_weight = multiply(transpose(left, 0, 1), right)
            del x, rows, left, right
        if weight is not None:
            low = cast(weight, grad.dtype)
            made_rows = multiply(flat, transpose(low, 0, 1) if turned else low)
            d_x = view(made_rows, *grad.shape[:-1], made_rows.shape[1])
        d_bias = None
        if node.needs(2):
            d_bias = sum_to(flat, (flat.shape[-1],))
        return d_x, d_weight, d_bias

    return rule
