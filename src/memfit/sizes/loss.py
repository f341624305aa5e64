"""Next-token cross entropy."""

from __future__ import annotations

from memfit.sizes.autograd import Gradients, Node, record
from memfit.sizes.elementwise import Incoming, attach, like, upstream
from memfit.sizes.tensor import Tensor, empty


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy(logits, labels, reduction="sum")`: (tokens, vocab) -> 0-dim."""
    return _negative_likelihood(_log_softmax(logits), labels)


def _log_softmax(x: Tensor) -> Tensor:
    node = record(_log_softmax_backward, (x,))
    result = attach(node, like(x))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _log_softmax_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(upstream(grads), node.unpack(0)),)


def _negative_likelihood(x: Tensor, labels: Tensor) -> Tensor:
    node = record(_negative_likelihood_backward, (x,), (x, labels))
    result = attach(node, empty(x.meter, (), x.dtype))
    weight = empty(x.meter, (), x.dtype)
    if node is not None:
        node.saved = [*node.saved, x.meter.pack(weight)]
    return result


def _negative_likelihood_backward(node: Node, grads: Incoming) -> Gradients:
    x, _, _ = (node.unpack(i) for i in range(3))
    return (like(x),)
