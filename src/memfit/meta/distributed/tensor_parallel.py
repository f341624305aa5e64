"""What ranks that share products allocate: tokens gathered and summed, a vocabulary that is cut.

Written as torch's DTensor runs `parallelize_module`'s styles and `loss_parallel` (torch 2.13:
distributed/_functional_collectives.py, distributed/tensor/placement_types.py, …/parallel/loss.py).
`tp` is the number of ranks. Collectives lay their parts rank after rank, so that tokens are copied
into that order before they are summed, and out of it where they are gathered of several rows.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, like, upstream
from memfit.meta.losses.cross_entropy import likelihood
from memfit.meta.tensor import Shape, Tensor, empty, workspace
from memfit.meta.workspace import embedding_backward


def gather_tokens(x: Tensor, tp: int) -> Tensor:
    """(batch, tokens / tp, width) -> (batch, tokens, width); backward sums, and cuts tokens."""
    node = record(_summing(tp), (x,))
    return attach(node, _gathered(x, tp))


def sum_tokens(x: Tensor, tp: int) -> Tensor:
    """(batch, tokens, width), summed over ranks -> (batch, tokens / tp, width)."""
    node = record(_gathering(tp), (x,))
    return attach(node, _summed(x, tp))


def _summing(tp: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (_summed(upstream(grads), tp),)

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
        indices = node.unpack(0)
        inside = embedding_backward(indices.numel, shape[-1]) if grad.meter.cuda else 0
        taken = workspace(grad.meter, inside)
        made = empty(grad.meter, (shape[0] * tp, *shape[1:]), grad.dtype)
        del taken, grad
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
