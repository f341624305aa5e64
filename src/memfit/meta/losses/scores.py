"""The last hidden state of each row, as train/step/preference.py takes it."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, like, upstream
from memfit.meta.tensor import Shape, Tensor, empty


def at_ends(hidden: Tensor, labels: Tensor, *, shared: bool = False) -> Tensor:
    """(rows, tokens, hidden), labels (rows, tokens) -> (rows, hidden); shared: rows may end on
    another rank."""
    meter, (rows, _, width) = hidden.meter, hidden.shape
    found = empty(meter, labels.shape, "bool")
    ends = empty(meter, (rows,), "int64")
    here = [empty(meter, (rows, 1), "bool")] if shared else []
    del found
    node = record(_at_ends_backward(hidden.shape), (hidden,), (ends, *here))
    return attach(node, empty(meter, (rows, width), hidden.dtype))


def _at_ends_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        made = empty(grad.meter, shape, grad.dtype)
        if len(node.saved) > 1:
            like(grad)  # without those of rows that end elsewhere
        return (made,)

    return rule
