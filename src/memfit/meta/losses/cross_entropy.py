"""Next-token cross entropy."""

from __future__ import annotations

from typing import NamedTuple

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, like, upstream
from memfit.meta.meter import Meter
from memfit.meta.tensor import Shape, Tensor, empty


class Bends(NamedTuple):
    """What the loss of a token is made of beside its cross-entropy."""

    smoothed: bool = False
    z_loss: bool = False


NO_BENDS = Bends()


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy(logits, labels, reduction="sum")`: (tokens, vocab) -> 0-dim."""
    return _negative_likelihood(log_softmax(logits), labels)


def cross_entropy_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy(logits, labels, reduction="none")`: (tokens, vocab) -> (tokens)."""
    x = log_softmax(logits)
    return _negative_likelihood(x, labels, x.shape[:1])


def log_softmax(x: Tensor) -> Tensor:
    """`torch.log_softmax(x, -1)`, which saves its result."""
    node = record(_log_softmax_backward, (x,))
    result = attach(node, like(x))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _log_softmax_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(upstream(grads), node.unpack(0)),)


def _negative_likelihood(x: Tensor, labels: Tensor, shape: Shape = ()) -> Tensor:
    return likelihood(_negative_likelihood_backward, x, labels, shape)


def likelihood(rule: Rule, x: Tensor, labels: Tensor, shape: Shape) -> Tensor:
    """`F.nll_loss` of log-probabilities: its result of this shape, and the weight that it saves."""
    node = record(rule, (x,), (x, labels))
    result = attach(node, empty(x.meter, shape, x.dtype))
    weight = empty(x.meter, (), x.dtype)
    if node is not None:
        node.saved = [*node.saved, x.meter.pack(weight)]
    return result


def _negative_likelihood_backward(node: Node, grads: Incoming) -> Gradients:
    x, _, _ = (node.unpack(i) for i in range(3))
    return (like(x),)


def bent_mean(logits: Tensor, capped: bool, bends: Bends) -> Tensor:
    """A regularised loss of all tokens as train/step/loss.py: (tokens, vocab) -> 0-dim.

    Its slope is made in the forward, and is all that it saves.
    """
    node = record(_bent_backward, (logits,))
    assert node is not None  # evaluations are not regularised
    with logits.meter.with_autocast(False):
        made = [like(logits) if capped else logits.detached()]
        loss, slope = _slope_of(made, capped, bends)
        slope = cast(slope, logits.dtype)
    node.saved = [slope]
    return attach(node, loss)


def _bent_backward(node: Node, grads: Incoming) -> Gradients:
    (slope,) = node.saved
    return (slope,)


def chunked_sum(
    hidden: Tensor, weight: Tensor, chunk: int, capped: bool = False, bends: Bends = NO_BENDS
) -> Tensor:
    """The loss with at most `chunk` tokens' logits alive, and its gradients made with it.

    As train/step/loss.py: hidden (tokens, hidden), weight (vocab, hidden) -> 0-dim.
    """
    meter = hidden.meter
    compute = meter.low if meter.autocast else hidden.dtype
    node = record(made_before, (hidden, weight))
    if node is None:
        return _losses_alone(hidden, weight, compute, chunk)
    total = empty(meter, (), "float32")
    d_hidden = like(hidden) if hidden.requires_grad else None
    with meter.with_autocast(False):
        d_weight = chunk_gradients(
            hidden.detached(), weight.detached(), compute, chunk, node, capped, bends
        )
    node.saved = [d_hidden, d_weight]
    return attach(node, total)


def _losses_alone(hidden: Tensor, weight: Tensor, compute: str, chunk: int) -> Tensor:
    """The sum of losses of an evaluation, which makes no gradient: -> 0-dim."""
    meter, (tokens, width), vocab = hidden.meter, hidden.shape, weight.shape[0]
    total = empty(meter, (), "float32")
    with meter.with_autocast(False):
        low = cast(weight, compute)
        meter.begin_product()
        for rows in chunk_sizes(meter, tokens, chunk):
            piece = cast(hidden.viewed((rows, width), hidden.strides), compute)
            logits = empty(meter, (rows, vocab), piece.dtype)
            del piece
            chances = widened(logits)
            loss, counted = empty(meter, (), "float32"), empty(meter, (), "float32")
            del logits, chances, loss, counted
        del low
    mean = empty(meter, (), "float32")
    del total
    return mean


def chunk_sizes(meter: Meter, tokens: int, chunk: int) -> list[int]:
    """Tokens of the chunks to run that leave nothing behind: the first and the last, or all."""
    chunks = -(-tokens // chunk)
    last = tokens - (chunks - 1) * chunk
    if meter.unrolled:
        return [*[chunk] * (chunks - 1), last]
    return [min(chunk, tokens), last]


def widened(logits: Tensor) -> Tensor:
    """`torch.log_softmax(logits, dim=-1, dtype=torch.float32)`."""
    # CUDA's log-softmax reads fp16 and writes fp32 (SoftMax.cpp); other kernels want a copy
    reads = logits.meter.cuda and logits.dtype == "float16"
    wide = logits if reads else cast(logits, "float32")
    return like(wide, dtype="float32")


def chunk_gradients(
    hidden: Tensor, weight: Tensor, compute: str, chunk: int, node: Node, capped: bool,
    bends: Bends = NO_BENDS,
) -> Tensor | None:  # fmt: skip
    """Every chunk in turn; returns the head's gradient.

    Those between the second and the last allocate and free what the second does: they only count.
    """
    meter, (tokens, width) = hidden.meter, hidden.shape
    low = cast(weight, compute)
    total: Tensor | None = None
    chunks = -(-tokens // chunk)
    seen = meter.passes(chunks)
    for index in seen:
        last = index == len(seen) - 1
        rows = tokens - (chunks - 1) * chunk if last else chunk
        piece = cast(hidden.viewed((rows, width), hidden.strides), compute)
        if index == 0:  # those of all chunks; the first one may be the first of a backward
            meter.begin_product()
        loss, slope = _slope(piece, low, capped, bends)  # that loss stays until the next chunk's
        slope = cast(slope, compute)
        if node.needs(0):
            empty(meter, (rows, width), compute)
        if node.needs(1):
            total = _outer(total, slope, piece, weight.dtype, alone=chunk >= tokens)
        del slope, piece
    del loss
    return None if total is None else cast(total, weight.dtype)


def _slope(
    piece: Tensor, weight: Tensor, capped: bool, bends: Bends
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, and its slope (rows, vocab) fp32: log-probabilities, turned in place."""
    made = [empty(piece.meter, (piece.shape[0], weight.shape[0]), piece.dtype)]
    return _slope_of(made, capped, bends)


def _slope_of(holder: list[Tensor], capped: bool, bends: Bends) -> tuple[Tensor, Tensor]:
    """The same of logits, whose last reference the list may hold: it is taken out of it."""
    logits = holder.pop()
    meter, rows = logits.meter, logits.shape[0]
    bent = logits if capped else None
    logits = like(logits) if capped else logits
    result = widened(logits)
    log_z = empty(meter, (rows, 1), "float32") if bends.z_loss else None
    del logits
    is_target = empty(meter, (rows, 1), "bool")
    column = empty(meter, (rows, 1), "int64")
    share = like(empty(meter, (rows, 1), "float32"))
    picked = empty(meter, (rows, 1), "float32")
    if bends.smoothed:
        empty(meter, (rows, 1), "float32")  # the mean over all words
    weighed = like(picked)
    loss = empty(meter, (), "float32")
    del picked, weighed
    minus_one = like(share)
    del minus_one, is_target, column, share, log_z
    if bent is not None:
        cast(bent, "float32")
    return loss, result


def _outer(
    total: Tensor | None, slope: Tensor, piece: Tensor, dtype: str, *, alone: bool
) -> Tensor:
    """slope.T @ piece, (vocab, hidden), added to the chunks before."""
    shape = (slope.shape[1], piece.shape[1])
    if total is not None and slope.dtype == total.dtype:
        return total  # added in place by the product itself
    product = empty(slope.meter, shape, slope.dtype)
    if alone:
        return product
    return cast(product, "float32") if total is None else total


def made_before(node: Node, grads: Incoming) -> Gradients:
    """Return the gradients of hidden states and the head, which the forward has saved."""
    d_hidden, d_weight = node.saved
    return d_hidden, d_weight
