"""Causal attention under the kernel that the recipe names; a mask only where windows are shorter.

There is no dropout of attention's weights, whatever a config.json says.

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

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.meta.attending.kernels import OLDEST_CUDNN, Capability, Heads, Platform, refusal, usable
from memfit.records.recipe import Recipe
from memfit.train.model.sinks import attend_with_sinks

with quiet_import():
    from transformers import AttentionInterface

Documents = Sequence[Sequence[int]]  # for each row, the lengths of its documents; they fill it

ROW = 16  # elements

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def register_attention(kernel: str) -> str:
    """Make the kernel known to Hugging Face; returns the name to build the model with."""
    name = f"memfit_{'tiled' if kernel == 'flash' else kernel}"  # "flash" would make HF import it
    attention: Callable[..., Any]
    if kernel == "varlen":  # its module imports torch's compiler, which few steps need
        from memfit.train.model.varlen import attend_end_to_end as attention
    else:
        attention = partial(attend, BACKENDS[kernel])
    AttentionInterface.register(name, attention)
    return name


def check_attention(
    recipe: Recipe, heads: Heads, platform: Platform, capability: Capability | None = None
) -> None:
    """Raise InvalidRequest when such a device has no such kernel for the model's heads and the
    recipe's dtype, or this cuDNN is too old for it."""
    dtype = recipe.compute_dtype
    refused = refusal(recipe.attention, dtype, heads, platform=platform, capability=capability)
    if refused:
        others = usable(dtype, heads, platform=platform, capability=capability)
        raise InvalidRequest(
            f"`attention: {recipe.attention}` {refused}", hint=f"use one of {', '.join(others)}"
        )
    if recipe.attention == "cudnn":
        _check_cudnn(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def _check_cudnn(here: int | None) -> None:
    """Raise InvalidRequest where cuDNN is too old; here: its number, as 91501 is 9.15.1."""
    if here is None or (version := _version(here)) >= OLDEST_CUDNN:
        return
    has, needed = (".".join(map(str, n)) for n in (version, OLDEST_CUDNN))
    raise InvalidRequest(
        f"`attention: cudnn` needs cuDNN {needed} or newer, and torch has {has} here",
        hint="use `attention: flash`, or torch's build for CUDA 13",
    )


def _version(number: int) -> tuple[int, int, int]:
    return number // 10_000, number // 100 % 100, number % 100


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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    band: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face calls: query (batch, heads, tokens, head_dim), key and value with kv_heads.

    Returns (batch, tokens, heads, head_dim). With `documents`, no token attends to another
    document: each is a separate call of the kernel, so nothing can leak. Where a value's head is
    narrower than a key's, flash gets values with zeros behind: it takes one size only. Ranks that
    share a row's tokens attend with each other (`parallelism.context`).
    `sliding_window` and `softcap` come from the model's class; band: see `make_band`, made here
    where it is None.
    """
    del attention_mask
    ring = getattr(module, "ring", None)
    if ring is not None:
        from memfit.train.distributed.ring import attend_in_ring  # imports what few runs need

        return attend_in_ring(query, key, value, ring, scaling).transpose(1, 2), None
    documents = documents or getattr(module, "documents", None)
    width = value.shape[-1]
    padding = query.shape[-1] - width if backend is SDPBackend.FLASH_ATTENTION else 0
    if padding:
        value = nn.functional.pad(value, (0, padding))
    grouped = query.shape[1] != key.shape[1]
    repeats = softcap is not None or backend is SDPBackend.EFFICIENT_ATTENTION
    if grouped and repeats:  # these have no grouped form
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        grouped = False
    kernel: Callable[..., Tensor] = partial(
        _choose, backend, scale=scaling, grouped=grouped, window=sliding_window, cap=softcap,
        band=band,
    )  # fmt: skip
    if s_aux is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        kernel = partial(attend_with_sinks, sinks=s_aux, scale=scale, window=sliding_window)
    if documents is None:
        out = kernel(query, key, value)
    else:
        out = _by_document(kernel, query, key, value, documents)
    if padding:
        out = out[..., :width]
    return out.transpose(1, 2), None


def _choose(
    backend: SDPBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    grouped: bool,
    window: int | None,
    cap: float | None,
    band: Tensor | None,
) -> Tensor:
    """One call: capped, within a window, or causal. (batch, heads, tokens, head_dim)."""
    tokens, keys = query.shape[2], key.shape[2]
    causal = True
    if tokens <= 1:  # one new token beside a cache sees everything before it
        causal = False  # asked, not assigned: code for any length would make it a symbol
    if cap is not None:
        return _capped(query, key, value, scale, cap, window)
    if window is None or keys <= window or not causal:
        return _run(backend, query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
    if backend is SDPBackend.FLASH_ATTENTION and query.is_cuda:
        # it takes no mask: training refuses it, and a longer text is generated with another
        backend = SDPBackend.MATH
    if band is None:
        band = make_band(keys, window, query.dtype, query.device)
    mask = band[:tokens, :keys]
    return _run(backend, query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def make_band(tokens: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(tokens, tokens): 0 where a row sees a column, itself and `window` - 1 before; else -inf.

    Rows lie a multiple of 16 elements apart, which the efficient kernel asks for.
    """
    shape = (tokens, -(-tokens // ROW) * ROW)
    after = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(1)
    before = torch.full(shape, -torch.inf, dtype=dtype, device=device).tril_(-window)
    return after.add_(before)[:, :tokens]


def _capped(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, cap: float, window: int | None
) -> Tensor:
    """Scores bent by a tanh, written out: no kernel of torch's has it (Gemma 2, 2408.00118)."""
    tokens, keys, size = query.shape[2], key.shape[2], query.shape[3]
    scale = size**-0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(2, 3)) * (scale / cap)
    scores = torch.tanh(scores) * cap
    if tokens > 1:
        reach = keys if window is None else window
        scores = scores + make_band(keys, reach, scores.dtype, scores.device)[-tokens:]
    weights = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
    return torch.matmul(weights, value)


def _run(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The kernel itself. cuDNN's takes no single key, and single queries beside a cache not in each
    version (`check_cudnn_sdpa_decode` of torch's MHA.cpp)."""
    if backend is SDPBackend.CUDNN_ATTENTION and query.shape[2] == 1:
        backend = SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend):
        return nn.functional.scaled_dot_product_attention(query, key, value, **options)


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
