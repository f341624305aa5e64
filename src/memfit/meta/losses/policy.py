"""Log-probabilities of each token and the policy's loss, as train/rl/token_log_probs.py and
train/rl/policy_loss.py: sizes alone, so that GRPO and RLOO are one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach, cast, like, negative, upstream
from memfit.meta.losses.cross_entropy import (
    chunk_gradients,
    chunk_sizes,
    cross_entropy_rows,
    log_softmax,
    widened,
)
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import reshape, view

FIGURES = 5  # of `train.rl.policy_loss.LossAndSums.sums`; the step adds the entropy


class TokenLogProbs(NamedTuple):
    """(rows, tokens) fp32 each; the entropy is never differentiated."""

    log_probs: Tensor
    entropy: Tensor


def plain_token_log_probs(logits: Tensor, labels: Tensor) -> TokenLogProbs:
    """(tokens, vocab) fp32, labels (rows, tokens of a row): logits live until the backward."""
    losses = cross_entropy_rows(logits, labels)
    with logits.meter.without_graph():
        chances = log_softmax(logits)
        entropy = _entropy(chances)
        del chances
    return TokenLogProbs(negative(view(losses, *labels.shape)), view(entropy, *labels.shape))


def _entropy(log_p: Tensor) -> Tensor:
    """(tokens, vocab) -> (tokens,)."""
    raised = like(log_p)
    product = like(raised)
    del raised
    total = empty(log_p.meter, log_p.shape[:1], "float32")
    del product
    found = like(total)
    del total
    empty(log_p.meter, log_p.shape[:1], "bool")  # where nothing is predicted
    return found


def chunked_token_log_probs(
    flat: Tensor, weight: Tensor, labels: Tensor, chunk: int, capped: bool
) -> TokenLogProbs:
    """flat (tokens, hidden), weight (vocab, hidden), labels (rows, tokens of a row): at most
    `chunk` tokens' logits are alive, which a backward makes a second time."""
    meter, shape = flat.meter, labels.shape
    compute = meter.low if meter.autocast else flat.dtype

    def slopes(node: Node, grads: Incoming) -> Gradients:
        flat, weight, outer = node.unpack(0), node.unpack(1), upstream(grads)
        of_entropy = empty(flat.meter, shape, "float32")  # zeros, which autograd makes
        share = reshape(like(outer), -1, 1)
        d_hidden = like(flat) if node.needs(0) else None
        d_weight = chunk_gradients(flat, weight, compute, chunk, node, capped)
        del share, of_entropy
        return d_hidden, d_weight

    node = record(slopes, (flat, weight), (flat, weight, labels))
    with meter.with_autocast(False):
        losses, entropy = _by_chunks(flat.detached(), weight.detached(), compute, chunk)
    return TokenLogProbs(attach(node, view(losses, *shape)), view(entropy, *shape))


def _by_chunks(flat: Tensor, weight: Tensor, compute: str, chunk: int) -> tuple[Tensor, Tensor]:
    """(tokens,) each: losses, and entropies."""
    meter, (tokens, width), vocab = flat.meter, flat.shape, weight.shape[0]
    losses, entropy = (empty(meter, (tokens,), "float32") for _ in range(2))
    low = cast(weight, compute)
    meter.begin_product()
    for rows in chunk_sizes(meter, tokens, chunk):
        piece = cast(flat.viewed((rows, width), flat.strides), compute)
        logits = empty(meter, (rows, vocab), piece.dtype)
        del piece
        chances = widened(logits)
        del logits
        each, counted = empty(meter, (rows,), "float32"), empty(meter, (), "float32")
        del each, counted
        _entropy(chances)
        del chances
    del low
    return losses, entropy


def policy_loss(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, tokens) -> the loss, 0-dim, and sums of what the log shows, (FIGURES,).

    What is computed in between is of a few numbers a token, beside the logits of the instant
    before: it is never the highest and is not described.
    """
    return loss_with_sums(log_probs, FIGURES)


def loss_with_sums(numbers: Tensor, figures: int) -> tuple[Tensor, Tensor]:
    """A loss of (rows, tokens), 0-dim, whose slope is made in the forward; sums (figures,)."""
    meter = numbers.meter
    loss, sums = empty(meter, (), "float32"), empty(meter, (figures,), "float32")
    slope = empty(meter, numbers.shape, "float32")
    node = record(partial(_sloped, figures), (numbers,), (slope,))
    return attach(node, loss), sums


def _sloped(figures: int, node: Node, grads: Incoming) -> Gradients:
    of_sums = empty(upstream(grads).meter, (figures,), "float32")  # zeros, which autograd makes
    made = like(node.unpack(0), upstream(grads))
    del of_sums
    return (made,)
