"""Log-probabilities of labels from tiles of the logits, as TRL makes them on CUDA.

Source: trl 1.16, kernels/chunked_logprob.py (`ChunkedLogProbFunction`; its Triton kernels allocate
nothing) and trainer/utils.py (`add_fused_lm_head`). What indexing by a mask allocates inside its
kernels, some 40 bytes a token, is not counted.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, like, scale, upstream
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import narrow

TOKENS, COLUMNS = 4096, 32768  # of a tile
STATISTICS = 7  # fp32 numbers of each token that the forward's kernel folds tiles into
SHOWN = 3  # tiles' rows run of many: the first, the second and the last


def log_probs_of_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, answered: int = 0
) -> list[Tensor]:
    """What the model returns instead of logits, of all tokens but each row's last.

    hidden: (rows, tokens, width); weight: (vocab, width). Every label counts, or the `answered`
    last ones of each row (the others are -100). Each (rows, tokens - 1): log-probabilities of
    labels, entropies, whether a label is likeliest.
    """
    meter, (rows, tokens, width) = hidden.meter, hidden.shape
    earlier = narrow(hidden, 1, 0, tokens - 1)
    mask = empty(meter, (rows, tokens - 1), "bool")
    count = rows * (answered or tokens - 1)
    chosen = _select(earlier, mask, count, width)
    labels = empty(meter, (count,), "int64")
    found = _log_probs(chosen, weight, bias, labels)
    del chosen, labels
    return [_back(one, mask) for one in found]


def tiled_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The loss of `SFTTrainer` from `log_probs_of_tokens`: a scalar, negated and divided."""
    outputs = log_probs_of_tokens(hidden, weight, bias)
    of_the_model = scale(scale(_summed(outputs[0])))
    loss = scale(_summed(scale(outputs[0])))
    del of_the_model, outputs
    return loss


def _select(x: Tensor, mask: Tensor, count: int, width: int) -> Tensor:
    """`x[mask]`: (rows, tokens, width) -> (count, width)."""

    def rule(node: Node, grads: Incoming) -> Gradients:
        return (empty(meter, shape, dtype),)

    meter, shape, dtype = x.meter, x.shape, x.dtype
    return attach(record(rule, (x,), (mask,)), empty(x.meter, (count, width), x.dtype))


def _back(x: Tensor, mask: Tensor) -> Tensor:
    """`x.new_zeros(mask.shape).masked_scatter(mask, x)`: (count) -> as the mask."""

    def rule(node: Node, grads: Incoming) -> Gradients:
        return (empty(meter, shape, dtype),)

    meter, shape, dtype = x.meter, x.shape, x.dtype
    zeros = empty(x.meter, mask.shape, x.dtype)
    result = attach(record(rule, (x,), (mask,)), like(zeros))
    del zeros
    return result


def _summed(x: Tensor) -> Tensor:
    def rule(node: Node, grads: Incoming) -> Gradients:
        return (upstream(grads).viewed(shape, (0,) * len(shape)),)

    shape = x.shape
    return attach(record(rule, (x,)), empty(x.meter, (), x.dtype))


def _log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> list[Tensor]:
    """(count, width) -> log-probabilities and entropies, fp32, and a truth: each (count)."""
    meter, count = hidden.meter, hidden.shape[0]
    compute = meter.low if meter.autocast else hidden.dtype
    sums = [empty(meter, (count,), "float32") for _ in range(STATISTICS)]
    tile = empty(meter, (_least(count), COLUMNS), compute)
    meter.begin_product()
    held = _run_tiles(hidden, weight, bias, compute, keeps=False)
    largest = like(sums[0])
    totals = like(largest)
    del largest
    log_probs = like(totals)
    share = like(totals)
    entropies = like(share)
    del share
    node = record(
        _log_probs_backward(compute), (hidden, weight, bias),
        (hidden, weight, bias, labels, totals, entropies),
    )  # fmt: skip
    above = [empty(meter, (count,), "bool") for _ in range(2)]
    likeliest = empty(meter, (count,), "bool")
    del tile, sums, above, held
    return [attach(node, log_probs), attach(node, entropies), likeliest]


def _run_tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: str, *, keeps: bool
) -> list[Tensor | None]:
    """Each tile's operands in the dtype of the product: what the variables hold at the end.

    A variable's tensor is freed when the next has been made; keeps: the head's part has one, too.
    """
    width, piece, part = hidden.shape[1], None, None
    for rows in _heights(hidden.shape[0]):
        piece = _part(hidden, (rows, width), compute)
        for n in _widths(weight.shape[0]):
            part = _part(weight, (n, width), compute)
            if not keeps:
                part = None
            if bias is not None:
                _part(bias, (n,), compute)
    return [piece, part]


def _part(x: Tensor, shape: tuple[int, ...], compute: str) -> Tensor:
    return cast(x.detached().viewed(shape, x.strides), compute)


def _log_probs_backward(compute: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        hidden, weight = node.unpack(0), node.unpack(1)
        bias = None if node.saved[2] is None else node.unpack(2)
        hidden.meter.begin_product()
        summed = [
            like(x.detached(), dtype="float32") if x is not None and node.needs(i) else None
            for i, x in enumerate((hidden, weight, bias))
        ]
        tile = empty(hidden.meter, (_least(hidden.shape[0]), COLUMNS), compute)
        held = _run_tiles(hidden, weight, bias, compute, keeps=True)
        results = [
            None if total is None or x is None else cast(total, x.dtype)
            for total, x in zip(summed, (hidden, weight, bias), strict=True)
        ]
        del tile, summed, held
        return results

    return rule


def _least(count: int) -> int:
    return count if count < TOKENS else TOKENS


def _heights(count: int) -> list[int]:
    """Rows of each tile that is run: those between the second and the last are as the second."""
    tiles = -(-count // TOKENS)
    seen = range(SHOWN if tiles > SHOWN else tiles)
    return [TOKENS for _ in seen[1:]] + [count - (tiles - 1) * TOKENS]


def _widths(vocab: int) -> list[int]:
    whole, rest = divmod(vocab, COLUMNS)
    return [COLUMNS] * whole + [rest] * (rest > 0)
