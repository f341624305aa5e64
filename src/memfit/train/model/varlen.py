"""Attention over documents that lie end to end in one tensor: one call of FlashAttention's kernel.

`attend` of `train.attention` calls its kernel once a document and joins what comes out. This one
tells the kernel where each document begins (`torch.nn.attention.varlen`), so that no call and no
copy is left that their number would multiply. torch has it on NVIDIA's devices alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 gives its kernel grouped heads unasked; newer ones refuse them without this word
ASKS_FOR_GROUPS = "enable_gqa" in signature(varlen_attn).parameters


def find_starts(documents: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(documents + 1,) int32: where each document begins in all rows laid end to end, and the end.

    documents: for each row, the lengths of its documents.
    """
    lengths = [length for row in documents for length in row]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)


def attend_end_to_end(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    starts: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face calls: query (batch, heads, tokens, head_dim), key and value with kv_heads.

    Returns (batch, tokens, heads, head_dim). No token attends to another document; without
    `documents` each row is one. starts: see `find_starts`, made here where it is None. Values
    narrower than keys are widened with zeros, as the kernel takes one size only. A window needs no
    mask here.
    """
    del module, attention_mask
    rows, heads, tokens, size = query.shape
    width = value.shape[-1]
    if width < size:
        value = nn.functional.pad(value, (0, size - width))
    documents = documents or ((tokens,),) * rows
    if starts is None:
        starts = find_starts(documents, query.device)
    longest = max(length for row in documents for length in row)
    reach = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1
    grouped: dict[str, Any] = (
        {"enable_gqa": True} if ASKS_FOR_GROUPS and heads != key.shape[1] else {}
    )
    query, key, value = (_end_to_end(_lower(x)) for x in (query, key, value))
    out = varlen_attn(
        query, key, value, starts, starts, longest, longest,
        scale=scaling, window_size=(reach, 0), **grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # alone, as no sums of logarithms are asked for
    return out[..., :width].reshape(rows, tokens, heads, width), None


def _lower(x: Tensor) -> Tensor:
    """As autocast has it for torch's own attention; it does not know this one."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _end_to_end(x: Tensor) -> Tensor:
    """(batch, heads, tokens, head_dim) -> (batch * tokens, heads, head_dim)."""
    return x.transpose(1, 2).flatten(0, 1)
