"""Log-probabilities of rows and the loss of pairs, as train/step/preference.py."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.distributed.tensor_parallel import cross_entropy_rows_cut
from memfit.meta.elementwise import Incoming, attach, cast, like, negative, upstream
from memfit.meta.losses.cross_entropy import (
    chunk_gradients,
    chunk_sizes,
    cross_entropy_rows,
    widened,
)
from memfit.meta.tensor import Shape, Tensor, empty
from memfit.meta.views import reshape, view

RESULTS = 3  # of `train.preference.Rewards.sums`; with a cross-entropy, one more
RATINGS = 4  # of those of rated answers; with a baseline, one more


def merge_context(labels: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Labels of all that is learned, and which of them are of answers; None: all."""
    if context is None:
        return labels, None
    answered = empty(labels.meter, labels.shape, "bool")
    return like(labels), answered


def plain_log_probs(
    logits: Tensor, labels: Tensor, answered: Tensor | None, *, cut: bool = False
) -> Tensor:
    """(tokens, vocab), labels (rows, tokens of a row) -> (rows,), or (2, rows) where answers are
    summed apart from the rest; logits are fp32. cut: ranks share the vocabulary."""
    losses = (cross_entropy_rows_cut if cut else cross_entropy_rows)(logits, labels)
    if answered is not None:
        node = record(_split_backward, (losses,), (answered,))
        return attach(node, _split(losses.detached(), labels.shape))
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


def _split(losses: Tensor, shape: Shape) -> Tensor:
    """(tokens,) -> (2, rows): sums of answers, and of all the rest."""
    meter, rows = losses.meter, shape[:1]
    product = like(losses)
    own = empty(meter, rows, "float32")
    del product
    turned = empty(meter, shape, "bool")
    product = like(losses)
    del turned
    rest = empty(meter, rows, "float32")
    del product
    result = empty(meter, (2, *rows), "float32")
    del own, rest
    return result


def _split_backward(node: Node, grads: Incoming) -> Gradients:
    answered = node.unpack(0)
    slope = empty(answered.meter, answered.shape, "float32")
    return (slope.viewed((answered.numel,), (1,)),)


def chunked_log_probs(
    flat: Tensor, weight: Tensor, labels: Tensor, answered: Tensor | None, chunk: int, capped: bool
) -> Tensor:
    """flat (tokens, hidden), weight (vocab, hidden), labels (rows, tokens of a row) -> (rows,), or
    (2, rows) where answers are summed apart from the rest."""
    meter = flat.meter
    compute = meter.low if meter.autocast else flat.dtype

    def slope(node: Node, grads: Incoming) -> Gradients:
        flat, weight, outer = node.unpack(0), node.unpack(1), upstream(grads)
        if len(outer.shape) > 1:
            share = empty(meter, shape, "float32")
        else:
            turned = like(outer)
            share = reshape(turned.viewed(shape, (1, 0)), -1, 1)
            del turned
        d_hidden = like(flat) if node.needs(0) else None
        d_weight = chunk_gradients(flat, weight, compute, chunk, node, capped)
        del share
        return d_hidden, d_weight

    shape = labels.shape
    saved = (flat, weight) if answered is None else (flat, weight, labels, answered)
    node = record(slope, (flat, weight), saved)
    with meter.with_autocast(False):
        sums = _by_chunks(flat.detached(), weight.detached(), shape, compute, chunk, answered)
    return attach(node, sums)


def _by_chunks(
    flat: Tensor, weight: Tensor, shape: Shape, compute: str, chunk: int, answered: Tensor | None
) -> Tensor:
    """The losses of all tokens, at most `chunk` tokens' logits alive; added up by row."""
    meter, (tokens, width), vocab = flat.meter, flat.shape, weight.shape[0]
    losses = empty(meter, (tokens,), "float32")
    low = cast(weight, compute)
    meter.begin_product()
    for rows in chunk_sizes(meter, tokens, chunk):
        piece = cast(flat.viewed((rows, width), flat.strides), compute)
        logits = empty(meter, (rows, vocab), piece.dtype)
        del piece
        chances = widened(logits)
        each, counted = empty(meter, (rows,), "float32"), empty(meter, (), "float32")
        del logits, chances, each, counted
    sums = empty(meter, shape[:1], "float32") if answered is None else _split(losses, shape)
    del losses, low
    return sums


def sum_over_ranks(x: Tensor) -> Tensor:
    """(rows,) of this rank's tokens -> of whole rows; the gradient is of its own."""
    node = record(_as_it_is, (x,))
    return attach(node, like(x))


def _as_it_is(node: Node, grads: Incoming) -> Gradients:
    return (upstream(grads),)


def judge(policy: Tensor, labels: Tensor, figures: int) -> tuple[Tensor, Tensor]:
    """(rows,) or (2, rows) of the policy -> the loss, 0-dim, and sums of what the log shows,
    (figures,): `RESULTS` of pairs or `RATINGS` of rated answers, and what stands beside them."""
    meter = policy.meter
    found = empty(meter, labels.shape, "bool")
    del found
    node = record(_judged_backward, (policy,))
    if node is not None:
        node.saved = [empty(meter, policy.shape, "float32")]
    loss, sums = empty(meter, (), "float32"), empty(meter, (figures,), "float32")
    return attach(node, loss), sums


def _judged_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(node.unpack(0), upstream(grads)),)
