"""Training for weights that will be rounded: forward and loss see them rounded already.

Weights stay in fp32; each product takes them as torchao's symmetric int8 (a scale a row) or int4 (a
scale for 32) would store them, and gradients pass as if nothing had been rounded (Bengio et al.
1308.3432; Jacob et al. 1712.05877). `torchao.quantization.quantize_` turns the trained folder into
the very model that was evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.families import read_model
from memfit.families.capabilities.products import is_of_block
from memfit.meta.layers.qat import GROUP
from memfit.records.recipe import Recipe

BITS = {"int8": 8, "int4": 4}
SWITCH = "rounds"  # the attribute of a projection whose weight is rounded


def round_weight(weight: Tensor, qat: str) -> Tensor:
    """(out, in) in fp32 -> the same as its codes stand for; no gradient."""
    out, into = weight.shape
    half = 2 ** (BITS[qat] - 1)
    groups = weight.view(out, -1, GROUP if qat == "int4" else into)
    scale: Tensor = torch.linalg.vector_norm(groups, float("inf"), dim=-1, keepdim=True)
    scale.div_(half - 0.5).clamp_(min=torch.finfo(torch.float32).eps)
    codes = groups * scale.reciprocal()
    codes.round_().clamp_(-half, half - 1).mul_(scale)
    return codes.view(out, into)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, qat: str) -> Tensor:
        return round_weight(weight, qat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def apply_qat(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Round the weights of the blocks' projections in every product; model: bare."""
    if not recipe.qat:
        return model
    for row in read_model(recipe.model).weights:
        if is_of_block(row):
            module = model.get_submodule(row.name.rpartition(".")[0])
            setattr(module, SWITCH, True)
            module.forward = _Forward(cast(nn.Linear, module), recipe.qat)
    return model


class _Forward:
    """In the place of a Linear's own."""

    def __init__(self, module: nn.Linear, qat: str) -> None:
        self.module, self.qat = module, qat

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        weight: Tensor = module.weight
        if getattr(module, SWITCH):
            weight = cast(Tensor, _Rounded.apply(weight, self.qat))  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight, module.bias)


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Products see the weights as they are meanwhile."""
    rounding = [m for m in model.modules() if getattr(m, SWITCH, False)]
    for module in rounding:
        setattr(module, SWITCH, False)
    try:
        yield
    finally:
        for module in rounding:
            setattr(module, SWITCH, True)
