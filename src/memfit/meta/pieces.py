"""Tensors that are seen repeatedly, or filled part by part."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, like, upstream
from memfit.meta.tensor import Shape, Tensor, empty


def expand(x: Tensor, *shape: int) -> Tensor:
    """`x.expand(shape)`: dimensions of size 1 are seen repeatedly; its gradient is a sum."""
    node = record(_expand_backward(x.shape), (x,))
    pairs = zip(x.shape, x.strides, shape, strict=True)
    strides = tuple(stride if size == n else 0 for size, stride, n in pairs)
    return attach(node, x.viewed(shape, strides))


def _expand_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (grad if grad.shape == shape else empty(grad.meter, shape, grad.dtype),)

    return rule


def fill_part(target: Tensor, source: Tensor) -> Tensor:
    """`target[..., a:b].copy_(source)`: the target, in which the source has a part now.

    torch/csrc/autograd/functions/tensor.cpp: the gradient of the whole is copied, the part cut
    out of it for the source, and zeros written there for what the target held before.
    """
    node = record(_fill_backward(target, source), (target, source))
    return attach(node, target.detached())


def _fill_backward(target: Tensor, source: Tensor) -> Rule:
    shape, strides, part, dtype = target.shape, target.strides, source.shape, source.dtype

    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        whole = empty(grad.meter, shape, grad.dtype, strides=strides)
        cut = empty(grad.meter, part, grad.dtype)
        zeros = empty(grad.meter, part, grad.dtype) if node.needs(0) else None
        gradient = cut if cut.dtype == dtype else like(cut, dtype=dtype)
        del zeros
        return (whole if node.needs(0) else None), gradient

    return rule
