"""What ranks that share products allocate: tokens gathered and summed, a vocabulary that is cut.

Written as torch's DTensor runs `parallelize_module`'s styles and `loss_parallel` (torch 2.13:
distributed/_functional_collectives.py, distributed/tensor/placement_types.py, …/parallel/loss.py).
`tp` is the number of ranks. Collectives lay their parts rank after rank, so that tokens are copied
into that order before they are summed, and out of it where they are gathered of several rows.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, like, upstream
from memfit.meta.losses.cross_entropy import Bends, likelihood
from memfit.meta.tensor import Shape, Tensor, empty, workspace
from memfit.meta.workspace import embedding_backward


def gather_tokens(x: Tensor, tp: int, *, alike: bool = False) -> Tensor:
    """(batch, tokens / tp, width) -> (batch, tokens, width); backward sums, and cuts tokens.

    alike: ranks do the same with what is gathered, so that nothing is summed.
    """
    node = record(_taking(tp) if alike else _summing(tp), (x,))
    return attach(node, _gathered(x, tp))


def sum_tokens(x: Tensor, tp: int) -> Tensor:
    """(batch, tokens, width), summed over ranks -> (batch, tokens / tp, width)."""
    node = record(_gathering(tp), (x,))
    return attach(node, _summed(x, tp))


def _summing(tp: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (_summed(upstream(grads), tp),)

    return rule


def _taking(tp: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        rows, tokens, width = grad.shape
        return (empty(grad.meter, (rows, tokens // tp, width), grad.dtype),)

    return rule


def _gathering(tp: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (_gathered(upstream(grads), tp),)

    return rule


def _gathered(x: Tensor, tp: int) -> Tensor:
    rows, tokens, width = x.shape
    joined = empty(x.meter, (tp * rows, tokens, width), x.dtype)
    if rows == 1:
        return joined.viewed((1, tp * tokens, width), (tp * tokens * width, width, 1))
    return empty(x.meter, (rows, tp * tokens, width), x.dtype)


def _summed(x: Tensor, tp: int) -> Tensor:
    rows, tokens, width = x.shape
    parts = empty(x.meter, (tp * rows, tokens // tp, width), x.dtype)
    out = empty(x.meter, (rows, tokens // tp, width), x.dtype)
    del parts
    return out


def gather_rows_cut(weight: Tensor, indices: Tensor, tp: int) -> Tensor:
    """`F.embedding` of a rank's part of the vocabulary: -> (batch, tokens / tp, width).

    Tokens of other ranks' parts become rows of zeros. The gradient is made for the whole
    vocabulary, and the rank's part copied out of it.
    """
    node = record(_gather_cut_backward(weight.shape, tp), (weight,), (indices,))
    mask = like(indices, dtype="bool")
    own = like(indices)
    rows = empty(weight.meter, (*indices.shape, weight.shape[-1]), weight.dtype)
    del own, mask
    return attach(node, _summed(rows, tp))


def _gather_cut_backward(shape: Shape, tp: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = _gathered(upstream(grads), tp)
        grads.clear()  # the gathering is a node of its own
        indices = node.unpack(0)
        rows = shape[0] * tp
        made = empty(grad.meter, (rows, *shape[1:]), grad.dtype)
        if grad.meter.cuda:
            workspace(grad.meter, *embedding_backward(indices.numel, rows, shape[-1]))
        del grad
        return (empty(made.meter, shape, made.dtype),)

    return rule


def cross_entropy_sum_cut(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy(logits, labels, reduction="sum")`: (tokens, vocab / tp) -> 0-dim."""
    chances = _log_softmax_cut(logits)
    return likelihood(_likelihood_cut_backward, chances, labels, ())


def cross_entropy_rows_cut(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy(logits, labels, reduction="none")`: (tokens, vocab / tp) -> (tokens)."""
    chances = _log_softmax_cut(logits)
    return likelihood(_likelihood_cut_backward, chances, labels, logits.shape[:1])


def _log_softmax_cut(x: Tensor) -> Tensor:
    node = record(_pass_on, (x,))
    column = (x.shape[0], 1)
    largest = empty(x.meter, column, x.dtype)
    largest = empty(x.meter, column, x.dtype)  # of all ranks
    shifted = like(x)
    raised = like(shifted)
    total = empty(x.meter, column, x.dtype)
    del raised
    total = empty(x.meter, column, x.dtype)
    logarithm = like(total)
    result = like(shifted)
    del largest, shifted, total, logarithm
    if node is not None:
        result = attach(node, result)
        node.saved = [x.meter.pack(result)]
    return result


def _pass_on(node: Node, grads: Incoming) -> Gradients:
    """Both backwards are one, of what comes after."""
    return (upstream(grads),)


def _likelihood_cut_backward(node: Node, grads: Incoming) -> Gradients:
    x, labels, _ = (node.unpack(i) for i in range(3))
    meter, tokens = x.meter, labels.numel
    target = empty(meter, (tokens, 1), "int64")
    slope = like(x)
    mask, own = empty(meter, (tokens,), "bool"), empty(meter, (tokens,), "int64")
    update = empty(meter, (tokens,), x.dtype)
    count = empty(meter, (tokens,), "int64")
    each = empty(meter, (tokens, 1), x.dtype)
    raised = like(x)
    both = like(slope, raised)
    del raised
    result = like(both, each)
    del target, slope, mask, own, update, count, each, both
    return (result,)


def bent_mean_cut(logits: Tensor, bends: Bends) -> Tensor:
    """As train/distributed/cut_loss.py: (tokens, vocab / tp) -> 0-dim, regularised.

    Its slope is made in the forward, and is all that it saves.
    """
    column = (logits.shape[0], 1)
    shares = _column_of(logits, column)
    node = record(_hand_out, (logits,))
    assert node is not None  # evaluations are not regularised
    loss, slope = _slope_cut(logits.detached(), column, bends)
    node.saved = [cast(slope, logits.dtype)]
    del shares, slope
    return attach(node, loss)


def _hand_out(node: Node, grads: Incoming) -> Gradients:
    (slope,) = node.saved
    return (slope,)


def _column_of(x: Tensor, column: Shape) -> Tensor:
    targets = empty(x.meter, column, "bool")
    shares = empty(x.meter, column, "float32")
    del targets
    return shares


def _slope_cut(logits: Tensor, column: Shape, bends: Bends) -> tuple[Tensor, Tensor]:
    """The loss, and its slope: log-probabilities, turned in place."""
    meter = logits.meter
    largest = cast(empty(meter, column, logits.dtype), "float32")
    result = like(cast(logits, "float32"))
    raised = like(result)
    log_z = empty(meter, column, "float32")
    del raised, largest
    own = empty(meter, column, "int64")
    below, above = empty(meter, column, "bool"), empty(meter, column, "bool")
    elsewhere = like(below)
    del below, above
    picked = empty(meter, column, "float32")
    if bends.smoothed:
        empty(meter, column, "float32")  # the mean over all words
    loss = empty(meter, (), "float32")
    minus = empty(meter, column, "float32")
    del own, elsewhere, picked, log_z, minus
    return loss, result
