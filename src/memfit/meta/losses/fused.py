"""Losses that never hold all logits, as the Trainer has them today: Liger's and cut cross-entropy.

Read from Liger-Kernel 0.8.5 (ops/fused_linear_cross_entropy.py; transformers/model/loss_utils.py)
and axolotl's fork of cut-cross-entropy at 5f0c7a7 (cce.py, cce_backward.py, utils.py).
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach, like
from memfit.meta.layers.liger import next_power_of_two
from memfit.meta.losses.cross_entropy import made_before
from memfit.meta.tensor import Tensor, empty


def shift_labels(labels: Tensor) -> Tensor:
    """`ForCausalLMLoss`, and Liger's: (rows, tokens) -> the same, padded and shifted by one."""
    rows, tokens = labels.shape
    padded = empty(labels.meter, (rows, tokens + 1), "int64")
    shifted = empty(labels.meter, (rows, tokens), "int64")
    del padded
    return shifted


def liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`LigerFusedLinearCrossEntropyFunction` on CUDA: (tokens, hidden), (vocab, hidden) -> ().

    Gradients are made in the forward, in the dtypes of what they are of. A chunk's logits are
    about as large as hidden, in one buffer; where autocast lowers the products, each makes its own
    result and copies of what it reads, the whole weight too: turned for the logits, and as it is
    for their gradient, which autocast keeps where the weight is trained.
    """
    meter, (tokens, width), vocab = hidden.meter, hidden.shape, weight.shape[0]
    low = meter.low if meter.autocast else hidden.dtype
    casts = hidden.dtype != low or weight.dtype != low
    node = record(made_before, (hidden, weight))
    chunk = min(next_power_of_two(-(-tokens // -(-vocab // width))), tokens)
    d_hidden = like(hidden)
    trained = node is not None and node.needs(1)
    d_weight = like(weight) if trained else None
    losses = empty(meter, (tokens,), "float32")
    mask, count = empty(meter, (tokens,), "bool"), empty(meter, (), "int64")
    del count
    logits: Tensor | None = None if casts else empty(meter, (chunk, vocab), low)
    cast_weight: Tensor | None = None
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        if casts:
            del logits
            logits = _lowered(hidden, weight, rows, low)
        meter.begin_product()
        if casts and (cast_weight is None or not trained):
            del cast_weight
            cast_weight = like(weight, dtype=low) if weight.dtype != low else None
        if node is not None and casts:
            empty(meter, (rows, width), low)
        if not trained:
            cast_weight = None
        if trained and casts:
            empty(meter, (rows, width), low)
    del logits, mask, cast_weight
    total = empty(meter, (), "float32")
    del losses
    if node is not None:
        node.saved = [d_hidden, d_weight]
    return attach(node, total)


def _lowered(hidden: Tensor, weight: Tensor, rows: int, low: str) -> Tensor:
    """A chunk's logits, whose factors autocast copies."""
    read = empty(hidden.meter, (rows, hidden.shape[1]), low) if hidden.dtype != low else None
    copied = like(weight, dtype=low) if weight.dtype != low else None
    logits = empty(hidden.meter, (rows, weight.shape[0]), low)
    del read, copied
    return logits


def cut_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`LinearCrossEntropyFunction`: (tokens, hidden), (vocab, hidden), (rows, tokens) -> ().

    No logits at all: log-sum-exps of the rows, and a mean logit of each word by which the backward
    leaves out what adds nothing. All labels but the first of a row count.
    """
    meter, vocab = hidden.meter, weight.shape[0]
    count = labels.shape[0] * (labels.shape[1] - 1)
    mask = empty(meter, (count,), "bool")
    wide = empty(meter, (count, 2), "int64")
    del mask
    narrow = empty(meter, (count, 2), "int32")
    del wide
    valid = empty(meter, (count,), "int64")
    del narrow
    sums = empty(meter, (count,), "float32")
    locks = empty(meter, (-(-count // 128),), "int32")
    means = empty(meter, (vocab,), "float32")
    del locks
    picked = empty(meter, (count,), "float32")
    meter.begin_product()
    node = record(_cut_backward, (hidden, weight), (hidden, weight))
    total = attach(node, empty(meter, (), "float32"))
    del picked
    if node is not None:
        node.saved = [*node.saved, sums, valid, means]
    return total


def _cut_backward(node: Node, grads: Incoming) -> Gradients:
    hidden, weight = node.unpack(0), node.unpack(1)
    meter, (tokens, width), vocab = hidden.meter, hidden.shape, weight.shape[0]
    order = empty(meter, (vocab,), "int64")
    order = empty(meter, (vocab,), "int32")
    d_hidden = like(hidden) if node.needs(0) else None
    d_weight = like(weight) if node.needs(1) else None
    blocks = -(-width // 64)
    locks = [empty(meter, (-(-tokens // 128), blocks), "int32")]
    if d_weight is not None:
        locks.append(empty(meter, (-(-vocab // 128), blocks), "int32"))
    meter.begin_product()
    del order, locks
    return d_hidden, d_weight
