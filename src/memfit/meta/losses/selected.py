"""Log-probabilities of chosen tokens, as trainers of pairs take them from logits.

Rules are those of torch's derivatives.yaml; what a kernel allocates inside itself is counted where
CUDA's allocator sees it.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, like, upstream
from memfit.meta.losses.cross_entropy import log_softmax
from memfit.meta.tensor import Shape, Tensor, empty, workspace


def gather_last(x: Tensor) -> Tensor:
    """`x.gather(-1, index).squeeze(-1)` of one index a row: keeps x, and zeros of its shape."""
    node = record(_gather_backward(x.shape), (x,), (x,))
    return attach(node, empty(x.meter, x.shape[:-1], x.dtype))


def _gather_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (empty(grad.meter, shape, grad.dtype),)

    return rule


def unbind(x: Tensor) -> list[Tensor]:
    """`x.unbind(0)`: views of its rows; the gradient stacks those of all of them."""
    node = record(_unbind_backward, (x,))
    rows = range(x.shape[0])
    return [attach(node, x.viewed(x.shape[1:], x.strides[1:])) for _ in rows]


def _unbind_backward(node: Node, grads: Incoming) -> Gradients:
    known = next(g for g in grads if g is not None)
    zeros = [like(known) for g in grads if g is None]
    result = empty(known.meter, (len(grads), *known.shape), known.dtype)
    del zeros
    return (result,)


def stack(parts: list[Tensor]) -> Tensor:
    """`torch.stack(parts)`; each part's gradient is a view of the whole's."""
    first = parts[0]
    node = record(_stack_backward, parts)
    return attach(node, empty(first.meter, (len(parts), *first.shape), first.dtype))


def _stack_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    return [grad.viewed(grad.shape[1:], grad.strides[1:]) for _ in node.edges]


def logsumexp_last(x: Tensor) -> Tensor:
    """`torch.logsumexp(x, -1)`: keeps x. What it makes for itself, of one row's size, is not
    counted: the entropy copies all rows when it has gone."""
    node = record(_logsumexp_backward, (x,), (x,))
    return attach(node, empty(x.meter, x.shape[:-1], x.dtype))


def _logsumexp_backward(node: Node, grads: Incoming) -> Gradients:
    x = node.unpack(0)
    less = like(x)  # C++ keeps every temporary of an expression to its end
    chances = like(less)
    return (like(upstream(grads).viewed(x.shape, (*less.strides[:-1], 0)), chances),)


def log_softmax_last(x: Tensor) -> Tensor:
    """`x.log_softmax(-1)`; CUDA's kernel copies what is not contiguous for itself (SoftMax.cu)."""
    copies = x.meter.cuda and not x.contiguous
    inside = workspace(x.meter, x.nbytes) if copies else None
    result = log_softmax(x)
    del inside
    return result


def sum_all(x: Tensor) -> Tensor:
    """A scalar made of all of x by way of a number a row."""
    node = record(_sum_backward(x.shape, x.dtype), (x,))
    return attach(node, empty(x.meter, (), x.dtype))


def _sum_backward(shape: Shape, dtype: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (empty(upstream(grads).meter, shape, dtype),)

    return rule
