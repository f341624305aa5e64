"""Lean blocks: Hugging Face's modules with less kept for the backward, and the same mathematics.

HF's eager Llama block keeps 45.7 bytes of bf16 for each token and hidden unit: the norm's input in
fp32 and rounded, its output, the activation beside its input, the product of both. All of these are
an elementwise kernel away from what is kept anyway (the residuals, gate and up), and backward makes
them again where a weight's gradient reads them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from memfit.recipe import Recipe
from memfit.train.hugging_face import parts
from memfit.train.lean.functions import GatedProduct, Linear, RmsNorm, gate, normalise
from memfit.train.lean.made import find, mark

__all__ = ["apply_lean"]


def apply_lean(model: nn.Module, recipe: Recipe) -> None:
    """Give the recipe's lean operations to every block, and to the norm behind the last.

    Before recomputation and sharding, on a model whose family has them (`families.lean`). Products
    of the blocks become lean with either operation; quantised ones keep their own code.
    """
    if not recipe.lean:
        return
    where = parts(model)
    for block in where.blocks:
        for module in block.modules():
            if _is_plain(module):
                _replace(module, _linear)
            elif "mlp" in recipe.lean and hasattr(module, "gate_proj"):
                _replace(module, _gated_mlp)
    if "norm" in recipe.lean:
        for block in where.blocks:
            direct = set(block.children())
            for module in block.modules():
                if _is_norm(module):
                    _replace(module, partial(_rms_norm, feeds=module in direct))
        for norm in where.norms:
            _replace(norm, partial(_rms_norm, feeds=False))


def _replace(module: nn.Module, forward: Any) -> None:
    module.forward = partial(forward, module)


def _is_plain(module: nn.Module) -> bool:
    """A Linear of torch's own over a tensor of numbers: not one whose weight is coded."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = Linear.apply(x, module.weight, module.bias, find(x))  # type: ignore[no-untyped-call]
    return out


def _rms_norm(module: nn.Module, x: Tensor, *, feeds: bool) -> Tensor:
    """feeds: whether products read the output itself, and not a view of it."""
    weight, eps = cast(Tensor, module.weight), module.variance_epsilon
    out, inverse = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return mark(out, normalise, x, inverse, weight) if feeds else cast(Tensor, out)


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    gates, up = module.gate_proj(x), module.up_proj(x)
    product = GatedProduct.apply(gates, up)  # type: ignore[no-untyped-call]
    out: Tensor = module.down_proj(mark(product, gate, gates, up))
    return out
