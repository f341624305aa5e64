"""A weight rounded for one product, as `train/model/qat.py` does it: sizes and history."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach, upstream
from memfit.meta.tensor import Tensor, empty

GROUP = 32  # weights that share a scale in int4; in int8 a row does


def round_weight(weight: Tensor, group: int) -> Tensor:
    """(out, in) -> the same; `group` weights share a scale. The gradient passes as it is."""
    node = record(_backward, (weight,))
    out, into = weight.shape
    scales = (out, into // group, 1)
    scale = empty(weight.meter, scales, weight.dtype)
    inverse = empty(weight.meter, scales, weight.dtype)
    codes = empty(weight.meter, weight.shape, weight.dtype)
    del inverse, scale
    return attach(node, codes)


def _backward(node: Node, grads: Incoming) -> Gradients:
    return (upstream(grads),)
