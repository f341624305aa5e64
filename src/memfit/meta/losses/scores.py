"""The last hidden state of each row, as train/step/preference.py takes it."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, upstream
from memfit.meta.tensor import Shape, Tensor, empty


def at_ends(hidden: Tensor, labels: Tensor) -> Tensor:
    """(rows, tokens, hidden), labels (rows, tokens) -> (rows, hidden)."""
    meter, (rows, _, width) = hidden.meter, hidden.shape
    found = empty(meter, labels.shape, "bool")
    ends = empty(meter, (rows,), "int64")
    del found
    node = record(_at_ends_backward(hidden.shape), (hidden,), (ends,))
    return attach(node, empty(meter, (rows, width), hidden.dtype))


def _at_ends_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (empty(grad.meter, shape, grad.dtype),)

    return rule
