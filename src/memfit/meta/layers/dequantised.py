"""Products with weights that bitsandbytes stores in 4 or 8 bits, and makes dense for each product.

Source: bitsandbytes 0.41.1 to 0.50, autograd/_functions.py (MatMul4Bit, MatMul8bitLt).
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.base_formats import Product
from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, upstream
from memfit.meta.tensor import Tensor, empty

QUANTISED_DTYPE = (
    "uint8"  # dtype of a simulated weight that is stored quantised; its shape is the dense one
)


class Dequantised(NamedTuple):
    """How a quantised weight is multiplied, and in which dtypes it becomes dense."""

    stored: str = "bfloat16"  # dtype that it was quantised from, and comes back in
    computed: str = "bfloat16"  # dtype that inputs are cast to (`bnb_4bit_compute_dtype`)
    # bitsandbytes before 0.43.2 kept the input, which no gradient needs, in an attribute of the
    # node: not a saved tensor, so that it lives until the graph itself is gone
    keeps_input: bool = False
    product: Product = "dense"

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., columns) x (rows, columns) -> (..., rows), in the dtype of x."""
        return cast(quantised_linear(cast(x, self.computed), weight, bias, self), x.dtype)


def quantised_linear(x: Tensor, weight: Tensor, bias: Tensor | None, how: Dequantised) -> Tensor:
    """`bnb.matmul_4bit`: (..., columns) x (rows, columns) -> (..., rows).

    The dense copy of the weight lives as long as the product, in the forward and in the backward.
    """
    if how.product == "int8":
        return _quantised_linear_8(x, weight, bias)
    saved = x.detached() if how.keeps_input else None
    node = record(_quantised_backward(how, weight.shape, saved), (x,))
    del saved
    dense = _dense(x, weight.shape, how)
    result = empty(x.meter, (*x.shape[:-1], weight.shape[0]), x.dtype)
    x.meter.begin_product()
    del dense, bias
    return attach(node, result)


def _dense(x: Tensor, shape: tuple[int, ...], how: Dequantised) -> Tensor:
    stored = empty(x.meter, shape, how.stored)
    return stored if how.stored == x.dtype else empty(x.meter, shape, x.dtype)


def _quantised_backward(how: Dequantised, shape: tuple[int, ...], saved: Tensor | None) -> Rule:
    attribute = [saved]  # freed with the rule, that is with its node

    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        dense = _dense(grad, shape, how) if attribute else grad
        grad.meter.begin_product()
        made = empty(grad.meter, (*grad.shape[:-1], shape[1]), grad.dtype)
        del dense
        return (made,)

    return rule


def _quantised_linear_8(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`bnb.matmul` of LLM.int8: rows of the input are quantised, the weight is never dense here.

    Its backward makes it dense in the input's dtype, and keeps the input, which none of it reads.
    """
    node = record(_quantised_backward_8(weight.shape), (x,), (x,))
    codes = empty(x.meter, x.shape, "int8")
    sums = empty(x.meter, (*x.shape[:-1], weight.shape[0]), "int32")
    result = empty(x.meter, sums.shape, x.dtype)
    x.meter.begin_product()
    del codes, sums, bias
    return attach(node, result)


def _quantised_backward_8(shape: tuple[int, ...]) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        node.unpack(0)
        dense = empty(grad.meter, shape, grad.dtype)
        grad.meter.begin_product()
        made = empty(grad.meter, (*grad.shape[:-1], shape[1]), grad.dtype)
        del dense
        return (made,)

    return rule
