"""What Hugging Face's own attention holds: masks of its backbones, and the functions they reach.

Source: transformers 5.24 (masking_utils.py, integrations/sdpa_attention.py, the classes' own
`eager_attention_forward`), torch 2.13 (aten/src/ATen/native/transformers/attention.cpp).
"""

from __future__ import annotations

import msgspec

from memfit import meta
from memfit.families.shared.attention_class import AttentionClass
from memfit.meta import Meter, Tensor
from memfit.meta.attending.kernels import BY_PREFERENCE, Capability, Heads, Platform, refusal
from memfit.records import Record
from memfit.records.model import SLIDING, Architecture

EAGER, SDPA, FLASH = "eager", "sdpa", "flash_attention_2"
GROUPED_HEAD = 256  # elements of the largest heads that sdpa is given in groups


class Masking(Record, frozen=True, kw_only=True):
    """How a loop over Hugging Face's classes runs their attention."""

    implementation: str  # transformers' attn_implementation
    padded: bool  # whether rows of a batch differ in length
    laid_out: bool  # whether a row is several documents, found by their positions
    kernel: str  # the one that sdpa is to take, or one that torch prefers less
    platform: Platform
    capability: Capability | None
    own: AttentionClass = AttentionClass()  # of the model's class


class Masks(msgspec.Struct, frozen=True):
    """The masks of one forward; None where attention runs with `is_causal`."""

    masking: Masking
    full: Tensor | None  # of blocks that see all tokens
    sliding: Tensor | None  # of blocks that look back over a window

    def of(self, a: Architecture, kind: str) -> Tensor | None:
        """The mask of a block of this kind."""
        return self.sliding if a.window(kind) else self.full

    def only(self, a: Architecture, kind: str) -> Masks:
        """Return the masks that a block of this kind holds while it may be recomputed."""
        slides = bool(a.window(kind))
        return Masks(self.masking, None if slides else self.full, self.sliding if slides else None)


def make_masks(
    masking: Masking,
    a: Architecture,
    meter: Meter,
    shape: tuple[int, int],
    dtype: str,
    *,
    before: int = 0,
) -> Masks:
    """Those of a backbone's call; shape: rows and tokens of the batch, dtype: of its embeddings.

    before: tokens of earlier calls, whose keys a cache holds.
    """
    alternates = bool(a.layer_kinds)
    slides = a.sliding_window > 0 and (not a.layer_kinds or SLIDING in a.layer_kinds)
    full = sliding = None
    if alternates or not slides:
        full = _mask(masking, a, meter, shape, dtype, 0, before)
    if slides:
        sliding = _mask(masking, a, meter, shape, dtype, a.sliding_window, before)
    return Masks(masking, full, sliding)


def _mask(
    masking: Masking,
    a: Architecture,
    meter: Meter,
    shape: tuple[int, int],
    dtype: str,
    window: int,
    before: int,
) -> Tensor | None:
    """(rows, 1, tokens, keys): booleans for sdpa, numbers for eager classes."""
    rows, tokens = shape
    keys = tokens + (min(before, window - 1) if window else before)
    eager = masking.implementation == EAGER
    reaches = 0 < window <= keys
    if masking.implementation == FLASH or a.alibi:  # those classes' own code makes theirs
        return None
    if not (eager or reaches or masking.padded or masking.laid_out or masking.own.always_masked):
        return None
    square = (rows, 1, tokens, keys)
    seen = meta.empty(meter, square, "bool")
    return meta.empty(meter, square, dtype) if eager else seen


def attend_masked(
    masks: Masks, a: Architecture, kind: str, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """(batch, heads, tokens, size), of a class that looks its attention up by name -> the same."""
    mask = masks.of(a, kind)
    if masks.masking.implementation == EAGER:
        return eager_attention(a, masks.masking.own, query, key, value, mask)
    groups = query.shape[1] // key.shape[1]
    whole = key.shape[-1] == value.shape[-1] and key.shape[-1] <= GROUPED_HEAD
    grouped = mask is None and whole
    repeats = key.shape[1] > 1 or not masks.masking.own.one_key
    expands = groups > 1 and not grouped and repeats
    if expands and query.shape[2] == 1 and key.shape[2] > 1:  # a decoding step: `pack_gqa`
        rows, heads, _, size = query.shape
        packed = meta.reshape(query, rows, heads // groups, groups, size)
        out = sdpa(masks.masking, packed, key, value, mask, grouped=False)
        return meta.reshape(out, rows, heads, 1, value.shape[-1])
    if expands:
        key, value = meta.expand_heads(key, groups), meta.expand_heads(value, groups)
    if masks.masking.implementation == FLASH and masks.masking.padded:
        kernel = choose_kernel(masks.masking, query, key, value, masked=False, grouped=grouped)
        return meta.without_padding(kernel, query, key, value)
    return sdpa(masks.masking, query, key, value, mask, grouped=grouped)


def sdpa(
    masking: Masking,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    grouped: bool,
) -> Tensor:
    """`F.scaled_dot_product_attention` under torch's own choice of a kernel."""
    kernel = choose_kernel(masking, query, key, value, masked=mask is not None, grouped=grouped)
    if kernel == "math" and not grouped:
        kernel = "broadcast"
    if mask is None:
        return meta.attention(kernel, query, key, value)
    dtype = query.meter.low if query.meter.autocast else query.dtype
    return meta.attention(kernel, query, key, value, meta.bias_of(mask, dtype, kernel))


def choose_kernel(
    masking: Masking, query: Tensor, key: Tensor, value: Tensor, *, masked: bool, grouped: bool
) -> str:
    """The kernel of torch's that serves these inputs, in its order of preference."""
    if masking.platform == "cpu":
        return masking.kernel if masking.kernel == "math" else "flash"
    dtype = query.meter.low if query.meter.autocast else query.dtype
    same, alike = query.shape[1] == key.shape[1], query.shape[-1] == value.shape[-1]
    whole = not masked and alike and (same or grouped)
    possible = {"flash": whole, "efficient": same, "cudnn": whole and key.shape[2] > 1}
    heads = Heads(query.shape[-1], value.shape[-1])
    for kernel in BY_PREFERENCE[BY_PREFERENCE.index(masking.kernel) :]:
        refused = refusal(
            kernel, dtype, heads, platform=masking.platform, capability=masking.capability
        )
        if not refused and possible.get(kernel, True):
            return kernel
    return "math"


def eager_attention(
    a: Architecture,
    own: AttentionClass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Scores written out: `eager_attention_forward` of the classes."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = meta.expand_heads(key, groups), meta.expand_heads(value, groups)
    if own.wide_scores:
        scores = meta.scale(
            meta.multiply_heads(
                meta.cast(query, "float32"), meta.transpose(meta.cast(key, "float32"), 2, 3)
            )
        )
    else:
        scores = meta.scale(meta.multiply_heads(query, meta.transpose(key, 2, 3)))
    if a.attention_cap:
        scores = meta.scale(scores)
        scores = meta.tanh(scores)
        scores = meta.scale(scores)
    if mask is not None:
        scores = meta.add(scores, mask)
    if own.narrow_softmax:
        chances = meta.softmax(scores)
    else:
        chances = meta.cast(meta.softmax_wide(scores), query.dtype)
    del scores
    return meta.multiply_heads(meta.cast(chances, value.dtype), value)
