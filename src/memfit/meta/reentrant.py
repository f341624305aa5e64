"""torch's reentrant checkpoint (`torch.utils.checkpoint.CheckpointFunction`).

The first forward runs without a graph. A backward reruns the whole function under the autocast
settings of the first, and a backward of its own inside: the function's result and the gradient
that it began with are held until that one is over.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.meta.autograd import FIRST, Gradients, Node, Rule, backward, record
from memfit.meta.tensor import Tensor


def checkpoint_reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`checkpoint(function, x, use_reentrant=True)`; what else requires gradients is trained."""
    meter = x.meter
    node = record(_rerun(function, meter.autocast, meter.casts is not None), (x,), (x,))
    with meter.without_graph():
        out = function(x)
    return out if node is None else node.attach(out)


def _rerun(function: Callable[[Tensor], Tensor], autocast: bool, caches: bool) -> Rule:
    def rule(node: Node, grads: list[Tensor | None]) -> Gradients:
        x = node.unpack(0).detached()
        meter, found = x.meter, want_gradient(x)
        before, meter.casts = meter.casts, {} if caches else None
        with meter.with_autocast(autocast):
            out = function(x)
        meter.casts = before
        backward(out, seed=grads[0])
        return tuple(found)

    return rule


def want_gradient(x: Tensor) -> list[Tensor | None]:
    """`x.requires_grad_()` of what has no history: where its gradient will be, for as long as what
    was made of x can be differentiated."""
    found: list[Tensor | None] = []

    def keep(node: Node, grads: list[Tensor | None]) -> Gradients:
        found.append(grads[0])
        return ()

    leaf = Node(x.meter, keep, ())
    leaf.sequence = FIRST  # as an AccumulateGrad
    leaf.attach(x)
    return found
