"""Causal attention without a mask, under the kernel that the recipe names.

Hugging Face's models look their attention up by name. Each kernel is registered under a name of
its own and no mask is, so that Hugging Face builds none. A name, unlike a context, also reaches
the recomputation, which runs on autograd's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from memfit.errors import InvalidRequest
from memfit.recipe import Recipe

Documents = Sequence[Sequence[int]]  # for each row, the lengths of its documents; they fill it

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def register_attention(kernel: str) -> str:
    """Make the kernel known to Hugging Face; returns the name to build the model with."""
    name = f"memfit_{'tiled' if kernel == 'flash' else kernel}"  # "flash" would make HF import it
    AttentionInterface.register(name, partial(attend, BACKENDS[kernel]))
    return name


def check_attention(recipe: Recipe, device_type: str) -> None:
    """Raise InvalidRequest when the device has no such kernel for the recipe's dtype."""
    half = recipe.compute_dtype != "float32"
    if recipe.attention == "efficient" and device_type == "cpu":
        raise InvalidRequest(
            "`attention: efficient` has no kernel on a CPU", hint="use `attention: flash`"
        )
    if recipe.attention == "flash" and device_type == "cuda" and not half:
        raise InvalidRequest(
            f"`attention: flash` needs 16-bit compute on CUDA, and `precision: {recipe.precision}`"
            " computes in fp32",
            hint="use `attention: efficient`, or `precision: bf16-mixed`",
        )


def attend(
    backend: SDPBackend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    documents: Documents | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face calls: query (batch, heads, tokens, head_dim), key and value with kv_heads.

    Returns (batch, tokens, heads, head_dim). With `documents`, no token attends to another
    document: each is a separate call of the kernel, so nothing can leak.
    """
    del module, attention_mask
    grouped = query.shape[1] != key.shape[1]
    if grouped and backend is SDPBackend.EFFICIENT_ATTENTION:  # has no grouped form
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        grouped = False
    causal = query.shape[2] > 1  # one new token beside a cache sees everything before it
    kernel = partial(
        nn.functional.scaled_dot_product_attention,
        is_causal=causal,
        scale=scaling,
        enable_gqa=grouped,
    )
    with sdpa_kernel(backend):
        if documents is None:
            out = kernel(query, key, value)
        else:
            out = _by_document(kernel, query, key, value, documents)
    return out.transpose(1, 2), None


def _by_document(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, documents: Documents
) -> Tensor:
    """One call of the kernel for each document; (batch, heads, tokens, head_dim).

    The rows are laid end to end first: one split and one join serve the whole micro-batch, and
    their backwards join gradients instead of adding a row to zeros for each of them.
    """
    lengths = [length for row in documents for length in row]
    pieces = [torch.split(_end_to_end(x), lengths, dim=2) for x in (query, key, value)]
    outputs = [kernel(q, k, v).transpose(1, 2) for q, k, v in zip(*pieces, strict=True)]
    rows, heads, tokens, _ = query.shape
    joined = _concatenate(outputs, 1)
    return joined.reshape(rows, tokens, heads, joined.shape[-1]).transpose(1, 2)


def _end_to_end(x: Tensor) -> Tensor:
    """(batch, heads, tokens, head_dim) -> (1, heads, batch * tokens, head_dim)."""
    rows, heads, tokens, size = x.shape
    return x.transpose(1, 2).reshape(1, rows * tokens, heads, size).transpose(1, 2)


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
