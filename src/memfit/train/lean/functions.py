"""Norm, gated product and linear with the mathematics of Hugging Face's modules and less kept.

Each is plain PyTorch, so that it traces and runs everywhere. Forwards run the same kernels in the
same order of rounding as Hugging Face's Llama; backwards of the norm are in fp32 throughout. What
each saves and allocates, in this order, is declared in `memfit.sizes.lean`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from memfit.train.lean.made import Made

_silu_backward = torch.ops.aten.silu_backward.default


def normalise(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """weight * x / root mean square, rounded to x's dtype before the weight, as Llama's norm."""
    wide = x * inverse  # fp32, whatever x is
    return weight * wide.to(x.dtype)


class RmsNorm(Function):
    """Root mean square norm (Zhang & Sennrich 1910.07467) that keeps its input and a number a row.

    x (..., hidden), weight (hidden) -> (..., hidden), and the inverse root mean squares (..., 1).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm and its statistic, which has no gradient of its own."""
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.mark_non_differentiable(inverse)
        ctx.set_materialize_grads(False)
        return normalise(x, inverse, weight), inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        """d x = (s - n * mean(s * n)) * inverse, with n = x * inverse and s = grad * weight."""
        x, inverse, weight = ctx.saved_tensors
        grad = grads[0]
        wide = x * inverse
        d_x: Tensor | None = None
        d_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            d_weight = _sum_rows(grad * wide)
        if ctx.needs_input_grad[0]:
            slope = grad * weight.to(wide.dtype)
            wide.mul_((slope * wide).mean(-1, keepdim=True))
            d_x = slope.sub_(wide).mul_(inverse).to(x.dtype)
        return d_x, d_weight, None


def _inverse(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of each row, in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()


def _sum_rows(x: Tensor) -> Tensor:
    """(..., columns) -> (columns)."""
    return x.sum(tuple(range(x.dim() - 1)))


def gate(gates: Tensor, up: Tensor) -> Tensor:
    """silu(gates) * up."""
    return F.silu(gates).mul_(up)


class GatedProduct(Function):
    """SwiGLU's product (Shazeer 2002.05202), which keeps its two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, up: Tensor) -> Tensor:
        """(..., ffn) twice -> (..., ffn)."""
        ctx.save_for_backward(gates, up)
        return gate(gates, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        """The activation is computed again."""
        gates, up = ctx.saved_tensors
        grad = grads[0]
        d_gates: Tensor | None = None
        d_up: Tensor | None = None
        if ctx.needs_input_grad[1]:
            d_up = F.silu(gates).mul_(grad)
        if ctx.needs_input_grad[0]:
            d_gates = _silu_backward(grad * up, gates)
        return d_gates, d_up


class Linear(Function):
    """`F.linear` that keeps its weight as it is stored, and of its input what it was made of.

    Autocast's 16-bit copies of weights live for their product alone. Of a frozen weight nothing of
    the input is kept, as in torch. x (..., columns), weight (rows, columns), bias (rows).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, made: Made | None
    ) -> Tensor:
        """(..., columns) -> (..., rows). made: what x was made of, where that is known."""
        low = _lowered(x)
        of_x, of_weight = ctx.needs_input_grad[:2]
        saved: list[Tensor] = [weight] if of_x else []
        ctx.remake = ctx.shared = None
        if of_weight and made is None:
            saved.append(low)
        elif of_weight and made is not None:
            saved += made.parts
            made.shared.wanted += 1
            ctx.remake, ctx.shared = made.remake, made.shared
        ctx.save_for_backward(*saved)
        return F.linear(low, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """The weight's gradient first: what it was made from is gone before the input's comes."""
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        weight, parts = _part(ctx.saved_tensors, of_x)
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        d_x: Tensor | None = None
        d_weight: Tensor | None = None
        if of_weight:
            x = parts[0] if ctx.shared is None else ctx.shared.take(ctx.remake, parts, grad.dtype)
            d_weight = flat.t() @ x.reshape(-1, x.shape[-1])
            del x
        if weight is not None:
            d_x = (flat @ weight.to(grad.dtype)).view(*grad.shape[:-1], weight.shape[1])
        return d_x, d_weight, flat.sum(0) if of_bias else None, None


def _part(saved: tuple[Tensor, ...], first: bool) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    return (saved[0], saved[1:]) if first else (None, saved)


def _lowered(x: Tensor) -> Tensor:
    """x as autocast hands it to a product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype != torch.float32:
        return x
    return x.to(torch.get_autocast_dtype(kind))
