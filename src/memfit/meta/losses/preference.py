"""Log-probabilities of rows and the loss of pairs, as train/step/preference.py."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, like, negative, upstream
from memfit.meta.losses.cross_entropy import (
    chunk_gradients,
    chunk_sizes,
    cross_entropy_rows,
    widened,
)
from memfit.meta.tensor import Shape, Tensor, empty
from memfit.meta.views import reshape, view

RESULTS = 3  # of `train.preference.Rewards.sums`


def plain_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """(tokens, vocab), labels (rows, tokens of a row) -> (rows,); logits are fp32."""
    losses = cross_entropy_rows(logits, labels)
    return negative(_sum_rows(view(losses, *labels.shape)))


def _sum_rows(x: Tensor) -> Tensor:
    """`x.sum(1)`: (rows, tokens) -> (rows,)."""
    node = record(_sum_rows_backward(x.shape), (x,))
    return attach(node, empty(x.meter, x.shape[:1], x.dtype))


def _sum_rows_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (grad.viewed(shape, (1, 0)),)

    return rule


def chunked_log_probs(
    flat: Tensor, weight: Tensor, labels: Tensor, chunk: int, capped: bool
) -> Tensor:
    """flat (tokens, hidden), weight (vocab, hidden), labels (rows, tokens of a row) -> (rows,)."""
    meter = flat.meter
    compute = meter.low if meter.autocast else flat.dtype

    def slope(node: Node, grads: Incoming) -> Gradients:
        flat, weight, outer = node.unpack(0), node.unpack(1), upstream(grads)
        turned = like(outer)
        share = reshape(turned.viewed(labels.shape, (1, 0)), -1, 1)
        del turned
        d_hidden = like(flat) if node.needs(0) else None
        d_weight = chunk_gradients(flat, weight, compute, chunk, node, capped)
        del share
        return d_hidden, d_weight

    node = record(slope, (flat, weight), (flat, weight))
    with meter.with_autocast(False):
        sums = _by_chunks(flat.detached(), weight.detached(), labels, compute, chunk)
    return attach(node, sums)


def _by_chunks(flat: Tensor, weight: Tensor, labels: Tensor, compute: str, chunk: int) -> Tensor:
    """The losses of all tokens, at most `chunk` tokens' logits alive; added up by row."""
    meter, (tokens, width), vocab = flat.meter, flat.shape, weight.shape[0]
    losses = empty(meter, (tokens,), "float32")
    low = cast(weight, compute)
    meter.count_product(2 * tokens * vocab * width)
    for rows in chunk_sizes(meter, tokens, chunk):
        piece = cast(flat.viewed((rows, width), flat.strides), compute)
        logits = empty(meter, (rows, vocab), piece.dtype)
        del piece
        chances = widened(logits)
        each, counted = empty(meter, (rows,), "float32"), empty(meter, (), "float32")
        del logits, chances, each, counted
    sums = empty(meter, labels.shape[:1], "float32")
    del losses, low
    return sums


def judge(policy: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(rows,) of the policy -> the loss, 0-dim, and sums of rewards, (3,)."""
    meter, (rows,) = policy.meter, policy.shape
    found = empty(meter, labels.shape, "bool")
    del found
    node = record(_judged_backward, (policy,))
    if node is not None:
        node.saved = [empty(meter, (rows,), "float32")]
    loss, sums = empty(meter, (), "float32"), empty(meter, (RESULTS,), "float32")
    return attach(node, loss), sums


def _judged_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(node.unpack(0), upstream(grads)),)
