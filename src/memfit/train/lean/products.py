"""A linear with the mathematics of Hugging Face's modules that saves less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from memfit.train.lean.made import Made


class Linear(Function):
    """`F.linear` that keeps its weight as it is stored, and of its input what it was made of.

    Autocast's 16-bit copies of weights live for their product alone. Of a frozen weight nothing of
    the input is saved, as in torch. x (..., columns), weight (rows, columns), bias (rows); `turned`
    weights are stored as (columns, rows), as GPT-2's are.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, made: Made | None, turned: bool
    ) -> Tensor:
        """(..., columns) -> (..., rows). made: what x was made of, where that is known."""
        low = _lowered(x)
        of_x, of_weight = ctx.needs_input_grad[:2]
        saved: list[Tensor | None] = [weight] if of_x else []
        ctx.remake = ctx.shared = None
        if of_weight and made is None:
            saved.append(low)
        elif of_weight and made is not None:
            saved += made.parts
            made.shared.wanted += 1
            ctx.remake, ctx.shared = made.remake, made.shared
        ctx.turned = turned
        ctx.save_for_backward(*saved)
        return F.linear(low, weight.t() if turned else weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *grads: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """The weight's gradient first: what it was made from is gone before the input's comes."""
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        weight, parts = _part(ctx.saved_tensors, of_x)
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        d_x: Tensor | None = None
        d_weight: Tensor | None = None
        if of_weight:
            x = parts[0] if ctx.shared is None else ctx.shared.take(ctx.remake, parts, grad.dtype)
            rows = x.reshape(-1, x.shape[-1])
            d_weight = rows.t() @ flat if ctx.turned else flat.t() @ rows
            del x, rows
        if weight is not None:
            low = weight.to(grad.dtype)
            d_x = (flat @ (low.t() if ctx.turned else low)).view(*grad.shape[:-1], -1)
        return d_x, d_weight, flat.sum(0) if of_bias else None, None, None


def _part(saved: tuple[Tensor, ...], first: bool) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    return (saved[0], saved[1:]) if first else (None, saved)


def _lowered(x: Tensor) -> Tensor:
    """x as autocast hands it to a product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype != torch.float32:
        return x
    return x.to(torch.get_autocast_dtype(kind))
