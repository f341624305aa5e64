"""Scaled dot-product attention, kernel by kernel, causal and without a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.meta.attending.kernels import FLASH_ALIGNMENT, MASK_ALIGNMENT
from memfit.meta.autograd import Gradients, Node, must_save, record
from memfit.meta.elementwise import (
    Incoming,
    add,
    attach,
    autocast_lower,
    cast,
    like,
    scale,
    softmax,
    tanh,
    upstream,
)
from memfit.meta.meter import Meter
from memfit.meta.pieces import expand
from memfit.meta.products import multiply_batched
from memfit.meta.tensor import Tensor, empty, workspace
from memfit.meta.views import (
    concatenate,
    narrow,
    pad_last,
    repeat_heads,
    reshape,
    split,
    transpose,
    view,
)
from memfit.meta.workspace import (
    copied_by_token,
    cudnn_backward,
    efficient_backward,
    efficient_forward,
    flash_backward,
)
from memfit.records.model import DTYPE_BYTES

ROW = 16  # elements; see train/model/attention.py
Documents = Sequence[int]  # the lengths of a row's documents, the same in every row


def attention(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, band: Tensor | None = None
) -> Tensor:
    """`F.scaled_dot_product_attention`: (batch, heads, tokens, size); key, value may be grouped.

    band: the mask of a sliding window, see `make_band`; None is causal without a mask.
    """
    low = [autocast_lower(x) for x in (value, key, query)]  # C++ evaluates the last first
    low.reverse()
    with query.meter.with_autocast(False):
        if kernel == "cudnn" and query.shape[2] == 1:
            kernel = "flash"  # as train/model/attention.py
        size = query.shape[-1]
        padding = -size % FLASH_ALIGNMENT if kernel == "flash" and query.meter.cuda else 0
        if not padding:
            return KERNELS[kernel](low[0], low[1], low[2], band)
        first, second, third = (pad_last(x, padding) for x in low)
        wide = KERNELS[kernel](first, second, third, None)  # this kernel has no mask
        return narrow(wide, 3, 0, size)


def without_padding(kernel: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same of rows that differ in length: tokens are copied without padding, and back to it.

    transformers/modeling_flash_attention_utils.py: _upad_input, _pad_input. Taken to be nearly as
    many tokens as with padding.
    """
    low = [_copy_tokens(autocast_lower(x)) for x in (key, value, query)]
    return _copy_tokens(attention(kernel, low[2], low[0], low[1]))


def _copy_tokens(x: Tensor) -> Tensor:
    """`x[indices]`, or `zeros[indices] = x`: either has a gradient of its own."""
    return attach(record(_copy_backward, (x,)), by_token(x))


def _copy_backward(node: Node, grads: Incoming) -> Gradients:
    return (by_token(upstream(grads)),)


def by_document(
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
) -> Tensor:
    """Lay the rows end to end, call the kernel for each document, and concatenate the results.

    Of many rows three run; the middle one stands for all between the first and the last: what its
    calls leave behind grows evenly, so that none of their instants is higher than one of the ends'.
    """
    rows, heads, tokens, _ = query.shape
    seen = query.meter.passes(rows)
    lengths = [*documents] * len(seen)
    pieces = [split(_end_to_end(x), lengths, 2) for x in (query, key, value)]
    calls = iter(zip(*pieces, strict=True))
    outputs: list[Tensor] = []
    for row in seen:
        with query.meter.standing_for(rows - len(seen) + 1 if row == 1 else 1):
            for _ in documents:
                outputs.append(transpose(call(*next(calls)), 1, 2))
    joined = outputs[0] if len(outputs) == 1 else concatenate(outputs, 1, rows * tokens)
    return transpose(reshape(joined, rows, tokens, heads, joined.shape[-1]), 1, 2)


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scores bent by a tanh, as train/model/attention.py writes it out; no grouped heads."""
    batch, heads, tokens, size = query.shape
    turned = transpose(key, 2, 3)
    low_turned = autocast_lower(turned)  # C++ evaluates the last first
    scores = scores_of(autocast_lower(query), low_turned)
    del turned, low_turned
    scores = scale(scores)
    scores = scale(tanh(scores))
    if tokens > 1:
        scores = add(scores, make_band(query, tokens, scores.dtype))
    weights = cast(softmax(cast(scores, "float32")), scores.dtype)
    low = autocast_lower(value)
    rows = reshape(weights, batch * heads, tokens, tokens)
    product = multiply_batched(rows, reshape(low, batch * heads, tokens, size))
    del rows, low
    return view(product, batch, heads, tokens, size)


def _end_to_end(x: Tensor) -> Tensor:
    """(batch, heads, tokens, size) -> (1, heads, batch * tokens, size)."""
    rows, heads, tokens, size = x.shape
    flat = reshape(transpose(x, 1, 2), 1, rows * tokens, heads, size)
    return transpose(flat, 1, 2)


def by_token(x: Tensor, size: int = 0) -> Tensor:
    """A new tensor of x's shape that lies in memory as (batch, tokens, heads, size)."""
    batch, heads, tokens, own = x.shape
    size = size or own
    strides = (tokens * heads * size, size, heads * size, 1)
    return empty(x.meter, (batch, heads, tokens, size), x.dtype, strides=strides)


def make_band(like: Tensor, tokens: int, dtype: str) -> Tensor:
    """The mask of train/model/attention.py: (tokens, tokens) of rows a multiple of 16 apart."""
    shape = (tokens, -(-tokens // ROW) * ROW)
    after = empty(like.meter, shape, dtype)
    before = empty(like.meter, shape, dtype)
    del before
    return after


def bias_of(mask: Tensor, dtype: str, kernel: str) -> Tensor:
    """A mask of booleans as torch hands it to a kernel: numbers, in rows that lie aligned.

    aten/src/ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, preprocess_mask.
    """
    numbers = empty(mask.meter, mask.shape, dtype)
    tokens = mask.shape[-1]
    width = -(-tokens // MASK_ALIGNMENT) * MASK_ALIGNMENT
    if kernel != "efficient" or width == tokens:
        return numbers
    return empty(mask.meter, (*mask.shape[:-1], width), dtype)


def _present(band: Tensor | None) -> tuple[Tensor, ...]:
    return () if band is None else (band,)


def _save_results(node: Node | None, meter: Meter, run: Callable[[], tuple[Tensor, ...]]) -> Tensor:
    """The first result of a kernel, which saves all of them beside its inputs."""
    out, *extra = must_save(meter, run)
    attach(node, out)
    if node is not None:
        node.saved = [*node.saved, *(meter.pack(x) for x in extra), meter.pack(out)]
    return out


def _flash(query: Tensor, key: Tensor, value: Tensor, band: Tensor | None) -> Tensor:
    """One kernel: saves its inputs, its result and a row of log-sums for each head.

    On CUDA also the state of the random generator, two 0-dim tensors.
    """
    meter = query.meter
    node = record(_flash_backward, (query, key, value), (query, key, value, *_present(band)))

    def run() -> tuple[Tensor, ...]:
        made = (like(query), empty(meter, query.shape[:3], "float32"))
        state = (empty(meter, (2,), "int64"), empty(meter, (), "int64")) if meter.cuda else ()
        return (*made, *state)

    return _save_results(node, meter, run)


def _flash_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    unpacked = [node.unpack(i) for i in range(len(node.saved))]
    query, key, value = unpacked[:3]
    if not grad.meter.cuda:
        return [by_token(x) for x in (query, key, value)]
    made = [like(x) for x in (query, key, value)]
    width = DTYPE_BYTES[query.dtype]
    copies = [copied_by_token(x.shape, x.strides, width) for x in (grad, unpacked[-1])]
    workspace(query.meter, *copies, *flash_backward(query.shape, key.shape, width))
    return made


def _efficient(query: Tensor, key: Tensor, value: Tensor, band: Tensor | None) -> Tensor:
    """CUDA's memory-efficient kernel: as flash, with fp32 inputs too and no grouped heads."""
    meter = query.meter
    node = record(_efficient_backward, (query, key, value), (query, key, value, *_present(band)))
    batch, heads, tokens, _ = query.shape
    padded = -(-tokens // 32) * 32 if node is not None else 0

    def run() -> tuple[Tensor, ...]:
        width = DTYPE_BYTES[query.dtype]
        made = (by_token(query, value.shape[-1]), empty(meter, (batch, heads, padded), "float32"))
        random = empty(meter, (), "int64"), empty(meter, (), "int64")
        workspace(meter, *efficient_forward(query.shape, value.shape[-1], width))
        return (*made, *random)

    return _save_results(node, meter, run)


def _efficient_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    unpacked = [node.unpack(i) for i in range(len(node.saved))]
    query, key, value = unpacked[:3]
    width = DTYPE_BYTES[query.dtype]
    made = [by_token(x) for x in (query, key, value)]
    pieces = efficient_backward(query.shape, value.shape[-1], grad.numel, width)
    workspace(query.meter, *pieces)
    return made


def _cudnn(query: Tensor, key: Tensor, value: Tensor, band: Tensor | None) -> Tensor:
    """cuDNN's kernel: as flash, with seed and offset of the random generator in two scalars."""
    meter = query.meter
    node = record(_cudnn_backward, (query, key, value), (query, key, value, *_present(band)))

    def run() -> tuple[Tensor, ...]:
        made = (like(query), empty(meter, (*query.shape[:3], 1), "float32"))
        return (*made, empty(meter, (), "int64"), empty(meter, (), "int64"))

    return _save_results(node, meter, run)


def _cudnn_backward(node: Node, grads: Incoming) -> Gradients:
    upstream(grads)
    unpacked = [node.unpack(i) for i in range(len(node.saved))]
    query, key, value = unpacked[:3]
    made = [like(x) for x in (query, key, value)]
    workspace(query.meter, *cudnn_backward(query.shape, key.shape))
    return made


def _broadcast(query: Tensor, key: Tensor, value: Tensor, band: Tensor | None) -> Tensor:
    """The math kernel without `enable_gqa`: keys and values have as many heads as queries."""
    return _math(query, key, value, band, grouped=False)


def _math(
    query: Tensor, key: Tensor, value: Tensor, band: Tensor | None, *, grouped: bool = True
) -> Tensor:
    """Products and a softmax: materialises (tokens x tokens) for every head, in fp32."""
    dtype = query.dtype
    query_wide, key_wide = cast(query, "float32"), cast(key, "float32")
    value_wide = cast(value, "float32")
    batch, heads, tokens, _ = query.shape
    scaled_query = scale(query_wide)
    steps = tokens == 1 and key.shape[2] > 1  # one new token sees all before it
    mask = _causal_mask(query) if band is None and not steps else band
    key_full, value_full = key_wide, value_wide  # C++ keeps the narrow ones to its end
    if key.shape[1] != heads and grouped:
        groups = heads // key.shape[1]
        key_full, value_full = repeat_heads(key_wide, groups), repeat_heads(value_wide, groups)
    turned = scale(transpose(key_full, 2, 3))
    if turned.shape[1] != heads:  # a product repeats them
        turned = expand(turned, batch, heads, *turned.shape[2:])
        value_full = expand(value_full, batch, heads, *value.shape[2:])
    scores = scores_of(scaled_query, turned)
    del turned
    masked = scores if mask is None else add(scores, mask)
    del scores
    weights = softmax(masked)
    del masked
    lowered = cast(weights.detached(), dtype)  # returned beside the result, and dropped
    rows = reshape(weights, batch * heads, tokens, key.shape[2])
    product = multiply_batched(rows, reshape(value_full, batch * heads, -1, value.shape[-1]))
    del rows
    out = cast(view(product, batch, heads, tokens, value.shape[-1]), dtype)
    del product, lowered
    return out


def _causal_mask(query: Tensor) -> Tensor:
    """(tokens, tokens) fp32, 0 and -inf, by way of booleans."""
    meter, tokens = query.meter, query.shape[2]
    ones = empty(meter, (tokens, tokens), "bool")
    lower = empty(meter, (tokens, tokens), "bool")
    del ones
    mask = empty(meter, (tokens, tokens), "float32")
    del lower
    return mask


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, tokens, size) x (batch, heads, size, tokens), as `torch.matmul` runs it."""
    batch, heads, tokens, size = query.shape
    flat_query = reshape(query, batch * heads, tokens, size)
    flat_key = reshape(key, batch * heads, size, key.shape[3])
    return view(multiply_batched(flat_query, flat_key), batch, heads, tokens, key.shape[3])


KERNELS = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
    "broadcast": _broadcast,
}
