"""The loss of values of sampled answers, as train/rl/values.py: sizes alone."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach, like, upstream
from memfit.meta.tensor import Tensor, empty

FIGURES = 3  # of `train.rl.values.ValueLoss.sums`


def value_loss(values: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, tokens) -> the loss, 0-dim, and sums of what the log shows, (FIGURES,).

    What is computed in between is of a few numbers a token: it is never the highest and is not
    described.
    """
    meter = values.meter
    loss, sums = empty(meter, (), "float32"), empty(meter, (FIGURES,), "float32")
    slope = empty(meter, values.shape, "float32")
    node = record(_sloped, (values,), (slope,))
    return attach(node, loss), sums


def _sloped(node: Node, grads: Incoming) -> Gradients:
    of_sums = empty(upstream(grads).meter, (FIGURES,), "float32")  # zeros, which autograd makes
    made = like(node.unpack(0), upstream(grads))
    del of_sums
    return (made,)
