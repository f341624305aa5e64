"""Attention of one new token a row with the slots: written out, so that every family has one form.

Hugging Face's classes ask for attention by a name in the config. While a step decodes, the name
is the one here; while a prompt is read, it is the one that the model trains with. Classes with
code of their own (a bias by distance) receive the mask instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.libraries import quiet_import
from memfit.train.generation.slots import Decode, Slots

with quiet_import():
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

NAME = "memfit_slots"
MASKED = "memfit_slots_masked"  # for classes that attend with their own code
_NOW: ContextVar[Decode] = ContextVar("the decoding step")


@contextmanager
def decoding(config: Any, slots: Slots, now: Decode, *, masked: bool) -> Iterator[None]:
    """Calls of the model are steps over the slots meanwhile."""
    slots.begin(now)
    slots.attending = attend_slots
    before = config._attn_implementation
    token = _NOW.set(now)
    config._attn_implementation_internal = MASKED if masked else NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        _NOW.reset(token)
        slots.attending = None


def attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face calls: query (rows, heads, 1, size), key and value (rows, kv_heads, ...).

    Returns (rows, 1, heads, size). Windows need no word here: a ring holds nothing else.
    """
    del module, attention_mask
    now = _NOW.get()
    rows, heads, _one, size = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    query = query.reshape(rows, kv_heads, heads // kv_heads, size)
    scale = size**-0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if now.uneven:
        scores = scores + now.mask(columns, scores.dtype)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).reshape(1, kv_heads, -1, 1).expand(rows, -1, -1, -1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if s_aux is not None:
        weights = weights[..., :-1]
    out = torch.matmul(weights.to(value.dtype), value)
    return out.reshape(rows, 1, heads, value.shape[3]), None


def _mask(**requested: Any) -> Tensor:
    return _NOW.get().mask(requested["kv_length"], requested["dtype"])


AttentionInterface.register(NAME, attend_slots)
AttentionMaskInterface.register(MASKED, _mask)
