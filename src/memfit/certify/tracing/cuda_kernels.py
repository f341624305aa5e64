"""What a CUDA build of torch would run where a build without CUDA decomposes or falls back.

Two kinds of operator choose by the kernels that the build has, and would allocate other tensors:
attention (falls back to the math kernel, which materialises tokens x tokens) and a few composite
operators with a CUDA kernel of their own (the composite form allocates its intermediate results).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from memfit.meta.attending.kernels import (
    FLASH_ALIGNMENT,
    MASK_ALIGNMENT,
    Capability,
    Heads,
    refusal,
)
from memfit.records.hardware import Device

aten = torch.ops.aten

# CompositeImplicitAutograd and a CUDA kernel, in native_functions.yaml of torch 2.11 to 2.13.
COMPOSITE_WITH_CUDA_KERNEL = ("silu_backward", "mish_backward")


@contextmanager
def cuda_kernels(device: Device) -> Iterator[None]:
    """Route the operators above to the kernels that this device has; undone at exit."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    attention = _attention(device.capability)
    with warnings.catch_warnings():  # torch warns of every kernel that is overridden
        warnings.simplefilter("ignore")
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, key)
        for name in COMPOSITE_WITH_CUDA_KERNEL:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _below_autograd(getattr(aten, name).default), "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masked: bool,
    grouped: bool,
    causal: bool = False,
    capability: Capability | None,
) -> SDPBackend | None:
    """The kernel of `sdp::select_sdp_backend`, in its default order, under the enabled flags.

    None when no enabled kernel can serve the inputs. An unknown capability counts as 8.0. cuDNN's
    comes last here: whether torch puts it first on 9.0 and 10.x depends on the version of cuDNN
    that is loaded, and memfit enables it alone.
    """
    if query.dim() == 4 and all(x.stride(-1) == 1 for x in (query, key, value)):
        same = query.shape[1] == key.shape[1] == value.shape[1]
        alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
        square = query.shape[2] == key.shape[2] or not causal
        possible = {
            "flash": not masked and alike and square and (same or grouped),
            "efficient": same and query.shape[-1] == key.shape[-1],
            "cudnn": not masked and alike and (same or grouped) and key.shape[2] != 1,
        }
        heads = Heads(query.shape[-1], value.shape[-1])
        dtype = str(query.dtype).removeprefix("torch.")
        for kernel, (enabled, backend) in _FUSED.items():
            unsupported = refusal(kernel, dtype, heads, capability=capability)
            if enabled() and possible[kernel] and not unsupported:
                return backend
    return SDPBackend.MATH if torch._C._get_math_sdp_enabled() else None


_FUSED: dict[str, tuple[Callable[[], bool], SDPBackend]] = {
    "flash": (torch._C._get_flash_sdp_enabled, SDPBackend.FLASH_ATTENTION),
    "efficient": (torch._C._get_mem_efficient_sdp_enabled, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": (torch._C._get_cudnn_sdp_enabled, SDPBackend.CUDNN_ATTENTION),
}


def _attention(capability: Capability | None) -> Callable[..., Tensor]:
    """`aten::scaled_dot_product_attention` as CUDA runs it: (batch, heads, tokens, head_dim)."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        backend = attention_backend(
            query, key, value,
            masked=attn_mask is not None, grouped=enable_gqa, causal=is_causal,
            capability=capability,
        )  # fmt: skip
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _as_numbers(attn_mask, query.dtype)
        if backend is SDPBackend.FLASH_ATTENTION:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        saved = any(x.requires_grad for x in (query, key, value)) and torch.is_grad_enabled()
        if backend is SDPBackend.CUDNN_ATTENTION:
            chosen = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, saved, dropout_p, is_causal, False, scale=scale
            )
        elif backend is SDPBackend.EFFICIENT_ATTENTION:
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            chosen = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, saved, dropout_p, is_causal, scale=scale
            )
        elif backend is None:
            raise RuntimeError("No available kernel. Aborting execution.")  # torch's own words
        else:
            chosen = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        out: Tensor = chosen[0]
        return out

    return attention


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans as scores are added to it (attention.cpp, convert_boolean_attn_mask)."""
    hidden = torch.scalar_tensor(-torch.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, hidden)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask of numbers as the efficient kernel takes it (attention.cpp, preprocess_mask).

    The kernel reads aligned rows, so that rows which are not aligned are copied into wider ones.
    """
    aligned = mask.stride(-1) == 1 and not any(n % MASK_ALIGNMENT for n in mask.stride()[:-1])
    if not aligned:
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, MASK_ALIGNMENT - width % MASK_ALIGNMENT))
        mask = mask[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """The flash kernel, with the head padded to a multiple of 8 as torch pads it."""
    head = query.shape[-1]
    padding = -head % FLASH_ALIGNMENT
    if padding:
        query, key, value = (torch.nn.functional.pad(x, (0, padding)) for x in (query, key, value))
    out: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False,
        scale=head**-0.5 if scale is None else scale,
    )[0]  # fmt: skip
    return out[..., :head] if padding else out


def _below_autograd(operator: Any) -> Callable[..., Any]:
    """The operator itself, not its decomposition; it has no gradient of its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return run
