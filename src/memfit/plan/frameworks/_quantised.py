"""Weights that bitsandbytes stores in 4 or 8 bits: their bytes, and products with them.

Source: bitsandbytes 0.41.1 to 0.50, functional.py (quantize_4bit, quantize_blockwise),
nn/modules.py (Params4bit, Linear8bitLt) and autograd/_functions.py (MatMul4Bit, MatMul8bitLt).
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.sizes import Tensor, empty
from memfit.sizes.autograd import Gradients, Node, Rule, record
from memfit.sizes.elementwise import Incoming, attach, upstream

CODED = "uint8"  # dtype of a simulated weight that is stored quantised; its shape is the dense one
BLOCK = 64  # weights that share one scale
SCALES_BLOCK = 256  # scales that share one of their own, where they are quantised again
FP32 = 4
TABLE = 256 * FP32  # of the 8-bit code that quantised scales are stored in


def four_bit_bytes(numel: int, *, double: bool) -> int:
    """Packed codes and their scales; double: the scales are stored in 8 bits themselves.

    Dettmers et al. 2305.14314, section 3: 4 + 32/64 = 4.5 bits a weight, or 4.127 with double
    quantisation.
    """
    scales = -(-numel // BLOCK)
    codes = -(-numel // 2)
    table = 16 * FP32  # of nf4 or fp4 itself, one a weight's state
    if not double:
        return codes + scales * FP32 + table
    return codes + scales + -(-scales // SCALES_BLOCK) * FP32 + TABLE + table + FP32


def eight_bit_bytes(rows: int, columns: int) -> int:
    """LLM.int8 (Dettmers et al. 2208.07339): one byte a weight and one fp32 scale a row."""
    return rows * columns + rows * FP32


class Dequantised(NamedTuple):
    """How a 4-bit weight becomes dense for each product with it."""

    stored: str  # dtype that it was quantised from, and comes back in
    # bitsandbytes before 0.43 kept the input, which no gradient needs, in an attribute of the
    # node: not a saved tensor, so that it lives until the graph itself is gone
    keeps_input: bool


def coded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, how: Dequantised) -> Tensor:
    """`bnb.matmul_4bit`: (..., columns) x (rows, columns) -> (..., rows).

    The dense copy of the weight lives as long as the product, in the forward and in the backward.
    """
    kept = x.detached() if how.keeps_input else None
    node = record(_coded_backward(how, weight.shape, kept), (x,))
    del kept
    dense = _dense(x, weight.shape, how)
    result = empty(x.meter, (*x.shape[:-1], weight.shape[0]), x.dtype)
    x.meter.count_product(2 * x.numel * weight.shape[0])
    del dense, bias
    return attach(node, result)


def _dense(x: Tensor, shape: tuple[int, ...], how: Dequantised) -> Tensor:
    stored = empty(x.meter, shape, how.stored)
    return stored if how.stored == x.dtype else empty(x.meter, shape, x.dtype)


def _coded_backward(how: Dequantised, shape: tuple[int, ...], kept: Tensor | None) -> Rule:
    attribute = [kept]  # freed with the rule, that is with its node

    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        dense = _dense(grad, shape, how) if attribute else grad
        grad.meter.count_product(2 * grad.numel * shape[1])
        made = empty(grad.meter, (*grad.shape[:-1], shape[1]), grad.dtype)
        del dense
        return (made,)

    return rule
