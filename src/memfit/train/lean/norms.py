"""Norms that keep their input and a statistic or two a row; forwards as Hugging Face's modules.

Backwards of root mean square norms are in fp32 throughout; LayerNorm's two kernels are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Normalise = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, inverse, weight -> the norm's output


def normalise(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """weight * x / root mean square, rounded to x's dtype before the weight, as Llama's norm."""
    wide = x * inverse  # fp32, whatever x is
    return weight * wide.to(x.dtype)


def normalise_wide(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Rounded to x's dtype after the weight, as OLMo 2's norm."""
    wide = x * inverse
    return (weight * wide).to(x.dtype)


def normalise_unit(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a weight that is stored minus 1 and round after it, as Gemma's norm."""
    wide = x * inverse
    return (wide * (1 + weight.to(wide.dtype))).to(x.dtype)


class RmsNorm(Function):
    """Root mean square norm (Zhang & Sennrich 1910.07467) that keeps its input and a number a row.

    x (..., hidden), weight (hidden) -> (..., hidden), and the inverse root mean squares (..., 1).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, normalise: Normalise
    ) -> tuple[Tensor, Tensor]:
        """The norm and its statistic, which has no gradient of its own."""
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.unit = normalise is normalise_unit
        ctx.mark_non_differentiable(inverse)
        ctx.set_materialize_grads(False)
        return normalise(x, inverse, weight), inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        """d x = (s - n * mean(s * n)) * inverse, with n = x * inverse and s = grad * weight."""
        x, inverse, weight = ctx.saved_tensors
        grad = grads[0]
        wide = x * inverse
        d_x: Tensor | None = None
        d_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            d_weight = _sum_rows(grad * wide)
        if ctx.needs_input_grad[0]:
            factor = weight.to(wide.dtype)
            slope = grad * (1 + factor if ctx.unit else factor)
            wide.mul_((slope * wide).mean(-1, keepdim=True))
            d_x = slope.sub_(wide).mul_(inverse).to(x.dtype)
        return d_x, d_weight, None, None


def _inverse(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of each row, in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()


def _sum_rows(x: Tensor) -> Tensor:
    """(..., columns) -> (columns)."""
    return x.sum(tuple(range(x.dim() - 1)))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's kernel, in the wider dtype of x and weight; its output, means and deviations.

    Autocast would cast to fp32 and keep the copy. The kernel computes in fp32 whatever it reads.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return torch.native_layer_norm(
            x.to(dtype), x.shape[-1:], weight.to(dtype), None if bias is None else bias.to(dtype),
            eps,
        )  # fmt: skip


class LayerNorm(Function):
    """Layer normalisation (Ba et al. 1607.06450) that keeps its input and two numbers a row.

    x (..., hidden), weight and bias (hidden) -> (..., hidden).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """As `nn.LayerNorm`, but for the dtype: see `layer_norm`."""
        out, mean, deviation = layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """torch's kernel."""
        x, weight, bias, mean, deviation = ctx.saved_tensors
        grad = grads[0]
        d_x, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x.to(grad.dtype), x.shape[-1:], mean, deviation, weight.to(grad.dtype),
            None if bias is None else bias.to(grad.dtype), ctx.needs_input_grad[:3],
        )  # fmt: skip
        return d_x, d_weight, d_bias, None


def normalise_rows(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the recomputed output of `LayerNorm`."""
    return layer_norm(x, weight, bias, eps)[0]
