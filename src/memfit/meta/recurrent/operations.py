"""Operations of recurrent layers, with what their derivatives hold (torch's derivatives.yaml)."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import (
    Incoming,
    attach,
    autocast_lower,
    like,
    upstream,
)
from memfit.meta.products import multiply_batched
from memfit.meta.tensor import Shape, Tensor, channels_last, empty
from memfit.meta.views import reshape, view


def cumulative_sum(x: Tensor) -> Tensor:
    """`x.cumsum(-1)`; its gradient is turned round, summed and turned back."""
    return attach(record(_cumulative_backward, (x,)), like(x))


def _cumulative_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    turned = like(grad)
    summed = like(turned)
    return (like(summed),)


def sum_last(x: Tensor) -> Tensor:
    """`x.sum(-1, keepdim=True)`; its gradient is expanded and takes no memory."""
    node = record(_sum_backward(x.shape), (x,))
    return attach(node, empty(x.meter, (*x.shape[:-1], 1), x.dtype))


def _sum_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (grad.viewed(shape, (*grad.strides[:-1], 0)),)

    return rule


def cast_row_major(x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype, memory_format=torch.contiguous_format)`: a row-major copy, but x itself where it
    has that dtype and its strides are not those of channels that lie last."""
    if x.dtype == dtype and not channels_last(x):
        return x
    node = record(_cast_backward(x.dtype), (x,))
    return attach(node, empty(x.meter, x.shape, dtype))


def _cast_backward(dtype: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (grad if grad.dtype == dtype else like(grad, dtype=dtype),)

    return rule


def pad(x: Tensor, dim: int, extra: int) -> Tensor:
    """`F.pad` behind the last element of one dimension: a copy, also where nothing is added."""
    node = record(_pad_backward(dim, extra), (x,))
    if not extra:
        return attach(node, like(x))
    shape = (*x.shape[:dim], x.shape[dim] + extra, *x.shape[dim + 1 :])
    return attach(node, empty(x.meter, shape, x.dtype))


def _pad_backward(dim: int, extra: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        shape = (*grad.shape[:dim], grad.shape[dim] - extra, *grad.shape[dim + 1 :])
        return (like(grad.viewed(shape, grad.strides)),)

    return rule


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """`x.repeat_interleave(repeats, dim=2)` of (batch, tokens, heads, size): a row-major copy."""
    batch, tokens, heads, size = x.shape
    node = record(_repeat_backward(repeats), (x,))
    return attach(node, empty(x.meter, (batch, tokens, heads * repeats, size), x.dtype))


def _repeat_backward(repeats: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        batch, tokens, heads, size = grad.shape
        return (empty(grad.meter, (batch, tokens, heads // repeats, size), grad.dtype),)

    return rule


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of stacks of matrices: (..., m, k) and (..., k, n) of the same stack."""
    low_b = autocast_lower(b)  # C++ evaluates the last first
    low_a = autocast_lower(a)
    stack = a.shape[:-2]
    count = 1
    for size in stack:
        count = count * size
    flat_a = reshape(low_a, count, *a.shape[-2:])
    flat_b = reshape(low_b, count, *b.shape[-2:])
    product = multiply_batched(flat_a, flat_b)
    return view(product, *stack, a.shape[-2], b.shape[-1])


def convolve(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """`F.conv1d` of each channel by itself: (batch, channels, tokens), (channels, 1, width) ->
    (batch, channels, tokens + 2 * padding - width + 1), row-major.

    What the kernel takes inside is not counted.
    """
    low_weight = autocast_lower(weight)  # C++ evaluates the last first
    low = autocast_lower(x)
    saved = (low, low_weight)
    node = record(_convolve_backward, saved, saved)
    batch, channels, tokens = x.shape
    shape = (batch, channels, tokens + 2 * padding - weight.shape[-1] + 1)
    return attach(node, empty(x.meter, shape, low.dtype))


def _convolve_backward(node: Node, grads: Incoming) -> Gradients:
    upstream(grads)
    x, weight = node.unpack(0), node.unpack(1)
    first = empty(x.meter, x.shape, x.dtype) if node.needs(0) else None
    second = empty(x.meter, weight.shape, x.dtype) if node.needs(1) else None
    return first, second


def solve_triangular(system: Tensor, right: Tensor) -> Tensor:
    """`torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)`:
    (..., n, n), (..., n, k) -> (..., n, k), column after column."""
    node = record(_solve_backward, (system, right))
    result = attach(node, _by_column(right))
    if node is not None:
        meter = right.meter
        node.saved = [meter.pack(system), meter.pack(result)]
    return result


def _by_column(x: Tensor) -> Tensor:
    *stack, rows, columns = x.shape
    turned = empty(x.meter, (*stack, columns, rows), x.dtype)
    turned.shape = x.shape
    turned.strides = (*turned.strides[:-2], 1, rows)
    turned._contiguous = None
    return turned


def _solve_backward(node: Node, grads: Incoming) -> Gradients:
    """FunctionsManual.cpp, linalg_solve_triangular_backward."""
    grad = upstream(grads)
    system, result = node.unpack(0), node.unpack(1)
    right = _by_column(grad)
    if not node.needs(0):
        return None, right
    product = like(system)  # right @ result^H
    slope = like(product)  # minus it
    del product
    lower = like(slope)  # its lower triangle
    del slope, result
    return lower, (right if node.needs(1) else None)
