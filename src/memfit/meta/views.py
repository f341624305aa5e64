"""Views, copies, joins: operations that move no numbers or only move them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, upstream
from memfit.meta.tensor import (
    SHAPES,
    Shape,
    Tensor,
    channels_last,
    channels_last_strides,
    empty,
    view_strides,
)


def reshape(x: Tensor, *shape: int) -> Tensor:
    """`x.reshape(shape)`: a view when one exists, else a contiguous copy. -1 is worked out."""
    full = _complete(x.shape, shape)
    if view_strides(x.shape, x.strides, full) is None:
        x = contiguous(x)
    return view(x, *full)


def view(x: Tensor, *shape: int) -> Tensor:
    """`x.view(shape)`."""
    full = _complete(x.shape, shape)
    strides = view_strides(x.shape, x.strides, full)
    if strides is None:
        raise ValueError(f"{x.shape} with strides {x.strides} has no view {full}")
    node = record(_reshape_backward(x.shape), (x,))
    return attach(node, x.viewed(full, strides))


@lru_cache(maxsize=SHAPES)
def _complete(own: Shape, shape: Shape) -> Shape:
    known = prod(s for s in shape if s != -1)
    return tuple(prod(own) // known if s == -1 else s for s in shape)


def _reshape_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (reshape(upstream(grads), *shape),)

    return rule


def contiguous(x: Tensor) -> Tensor:
    """`x.contiguous()`: itself, or a row-major copy."""
    if x.contiguous:
        return x
    node = record(_pass_backward, (x,))
    return attach(node, empty(x.meter, x.shape, x.dtype))


def _pass_backward(node: Node, grads: Incoming) -> Gradients:
    return (upstream(grads),)


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    """`x.transpose(a, b)`."""
    node = record(_transpose_backward(a, b), (x,))
    return attach(node, _transposed(x, a, b))


def _transposed(x: Tensor, a: int, b: int) -> Tensor:
    shape, strides = list(x.shape), list(x.strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return x.viewed(tuple(shape), tuple(strides))


def _transpose_backward(a: int, b: int) -> Rule:
    def transposed(node: Node, grads: Incoming) -> Gradients:
        return (_transposed(upstream(grads), a, b),)

    return transposed


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """`x.unsqueeze(dim)`."""
    node = record(_unsqueeze_backward(dim), (x,))
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    step = x.strides[dim] * x.shape[dim] if dim < len(x.shape) else 1
    return attach(node, x.viewed(shape, (*x.strides[:dim], step, *x.strides[dim:])))


def _unsqueeze_backward(dim: int) -> Rule:
    def squeeze(node: Node, grads: Incoming) -> Gradients:
        x = upstream(grads)
        strides = (*x.strides[:dim], *x.strides[dim + 1 :])
        return (x.viewed((*x.shape[:dim], *x.shape[dim + 1 :]), strides),)

    return squeeze


def expand_heads(x: Tensor, repeats: int) -> Tensor:
    """(batch, heads, sequence, size) -> heads repeated in place: a copy, as `repeat_kv` makes."""
    batch, heads, sequence, size = x.shape
    node = record(_expand_backward(x.shape), (x,))
    full = (batch, heads, repeats, sequence, size)
    strides = (x.strides[0], x.strides[1], 0, x.strides[2], x.strides[3])
    wide = attach(node, x.viewed(full, strides))
    return reshape(wide, batch, heads * repeats, sequence, size)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """`x.repeat_interleave(repeats, 1)`: as `expand_heads`, and a copy even of a single head."""
    batch, heads, sequence, size = x.shape
    node = record(_expand_backward(x.shape), (x,))
    full = (batch, heads, repeats, sequence, size)
    strides = (x.strides[0], x.strides[1], 0, x.strides[2], x.strides[3])
    wide = attach(node, x.viewed(full, strides))
    copy = attach(record(_pass_backward, (wide,)), empty(x.meter, full, x.dtype))
    return view(copy, batch, heads * repeats, sequence, size)


def _expand_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (empty(grad.meter, shape, grad.dtype),)

    return rule


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`x.narrow(dim, start, length)`; its gradient is a full tensor of zeros around it."""
    node = record(_narrow_backward(x.shape), (x,))
    return attach(node, _narrowed(x, dim, length))


def _narrowed(x: Tensor, dim: int, length: int) -> Tensor:
    return x.viewed((*x.shape[:dim], length, *x.shape[dim + 1 :]), x.strides)


def _narrow_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (empty(grad.meter, shape, grad.dtype),)

    return rule


def select(x: Tensor, dim: int) -> Tensor:
    """`x.select(dim, index)`: a view without that dimension; zeros around its gradient."""
    node = record(_narrow_backward(x.shape), (x,))
    strides = (*x.strides[:dim], *x.strides[dim + 1 :])
    return attach(node, x.viewed((*x.shape[:dim], *x.shape[dim + 1 :]), strides))


def every_other(x: Tensor) -> Tensor:
    """`x[..., start::2]` of an even size; its gradient is a full tensor of zeros around it."""
    node = record(_narrow_backward(x.shape), (x,))
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return attach(node, x.viewed(shape, (*x.strides[:-1], 2 * x.strides[-1])))


def pad_last(x: Tensor, extra: int) -> Tensor:
    """`F.pad(x, (0, extra))`: a copy; its gradient is a copy without the padding."""
    node = record(_pad_backward(extra), (x,))
    return attach(node, empty(x.meter, (*x.shape[:-1], x.shape[-1] + extra), x.dtype))


def _pad_backward(extra: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (empty(grad.meter, (*grad.shape[:-1], grad.shape[-1] - extra), grad.dtype),)

    return rule


def split(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """`x.split(sizes, dim)`; the gradient joins all parts, missing ones as zeros."""
    node = record(_split_backward(x.shape, tuple(sizes), dim), (x,))
    parts = [_narrowed(x, dim, size) for size in sizes]
    return [attach(node, part) for part in parts]


def _split_backward(shape: Shape, sizes: Shape, dim: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        known = next(g for g in grads if g is not None)
        parts = [
            empty(known.meter, (*shape[:dim], size, *shape[dim + 1 :]), known.dtype)
            if g is None
            else g
            for size, g in zip(sizes, grads, strict=True)
        ]
        # as `torch.cat` lays it out (cat_compute_output_memory_format, ATen/native/TensorShape.cpp)
        strides = channels_last_strides(shape) if all(map(channels_last, parts)) else None
        result = empty(known.meter, shape, known.dtype, strides=strides)
        del parts
        return (result,)

    return rule


def concatenate(parts: Sequence[Tensor], dim: int, whole: int = 0) -> Tensor:
    """`torch.cat(parts, dim)`; each part's gradient is a view of the whole's.

    A CPU's autocast makes copies of the narrower parts first, in the widest dtype. whole: length of
    the result, where parts stand for several.
    """
    first = parts[0]
    wide = "float32" if any(p.dtype == "float32" for p in parts) else first.dtype
    widens = first.meter.autocast and not first.meter.cuda
    joined = [cast(p, wide) for p in parts] if widens else list(parts)
    lengths = [p.shape[dim] for p in parts]
    node = record(_concatenate_backward(dim, lengths), joined)
    length = sum(lengths) if whole == 0 else whole
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return attach(node, empty(first.meter, shape, wide))


def _concatenate_backward(dim: int, lengths: list[int]) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return [_narrowed(grad, dim, n) if node.needs(i) else None for i, n in enumerate(lengths)]

    return rule
