"""Activations of feed-forwards that keep their input alone, by Hugging Face's names for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

_aten = torch.ops.aten


Kernel = Callable[..., Tensor]  # elementwise, into a new tensor


class Curve(NamedTuple):
    """An activation and its derivative, a kernel each."""

    value: Kernel  # of x
    slope: Kernel  # of grad and x, times grad


_TANH = Curve(
    partial(F.gelu, approximate="tanh"),
    partial(_aten.gelu_backward.default, approximate="tanh"),
)
# Two of Hugging Face's are the tanh form written out in eight kernels or nine.
CURVES = {
    "silu": Curve(F.silu, _aten.silu_backward.default),
    "gelu": Curve(F.gelu, _aten.gelu_backward.default),
    "gelu_pytorch_tanh": _TANH,
    "gelu_new": _TANH,
    "gelu_fast": _TANH,
}


class Activation(Function):
    """One of `CURVES`, by name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        """(..., ffn) -> (..., ffn)."""
        ctx.save_for_backward(x)
        ctx.curve = CURVES[name]
        return CURVES[name].value(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """One kernel."""
        (x,) = ctx.saved_tensors
        grad = grads[0]
        return ctx.curve.slope(grad, x), None


def gate(name: str, gates: Tensor, up: Tensor) -> Tensor:
    """curve(gates) * up."""
    return CURVES[name].value(gates).mul_(up)


class GatedProduct(Function):
    """The product of gated units (Shazeer 2002.05202), which keeps its two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, up: Tensor, name: str) -> Tensor:
        """(..., ffn) twice -> (..., ffn); name: of the gates' activation."""
        ctx.save_for_backward(gates, up)
        ctx.curve = CURVES[name]
        return gate(name, gates, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of gates and up; the activation is recomputed."""
        gates, up = ctx.saved_tensors
        grad = grads[0]
        d_gates: Tensor | None = None
        d_up: Tensor | None = None
        if ctx.needs_input_grad[1]:
            d_up = ctx.curve.value(gates).mul_(grad)
        if ctx.needs_input_grad[0]:
            d_gates = ctx.curve.slope(grad * up, gates)
        return d_gates, d_up, None
