"""Lean blocks: Hugging Face's modules that save less for the backward, with the same mathematics.

HF's eager Llama block saves 45.7 bytes of bf16 for each token and hidden unit: the norm's input in
fp32 and rounded, its output, the activation beside its input, the product of both. All of these are
an elementwise kernel away from what is saved anyway (the residuals, gate and up), and backward
recomputes them where a weight's gradient reads them. Each operation is plain PyTorch, so it traces
and runs everywhere; what it saves and allocates, in this order, is declared in
`memfit.meta.layers.lean`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from memfit.families import read_model
from memfit.records.recipe import Recipe
from memfit.train.lean.activations import CURVES, Activation, GatedProduct, gate
from memfit.train.lean.made import find, mark
from memfit.train.lean.norms import (
    LayerNorm,
    Normalise,
    RmsNorm,
    normalise,
    normalise_rows,
    normalise_unit,
    normalise_wide,
)
from memfit.train.lean.products import Linear
from memfit.train.model.hugging_face import parts

__all__ = ["apply_lean", "is_product"]

TURNED = "Conv1D"  # GPT-2's: (columns, rows)
OWN_PRODUCTS = (TURNED, "FalconLinear")  # of Hugging Face's, over a weight as torch's
PLAIN = ("act", "activation_fn", "gelu_impl")  # names of activations between two projections


def apply_lean(model: nn.Module, recipe: Recipe) -> None:
    """Give the recipe's lean operations to every block, and to the norm behind the last.

    Before recomputation and sharding, on a model whose family has them (`families.lean`). Products
    of the blocks become lean with either operation; quantised ones keep their own code. Compiled
    blocks keep no more as they are (`train/model/partition.py`): theirs is the norm alone.
    """
    model_parts = parts(model)
    curve = read_model(recipe.model).architecture.activation
    for block in model_parts.blocks if recipe.lean else ():
        direct = set(block.children())
        for module in list(block.modules()):
            if _is_plain(module):
                _replace(module, partial(_linear, turned=type(module).__name__ == TURNED))
            elif "norm" in recipe.lean and _is_norm(module):
                _replace_norm(module, feeds=module in direct)
            elif "mlp" in recipe.lean:
                _replace_activation(module, curve)
    if "norm" in recipe.lean or recipe.compile == "blocks":
        for norm in model_parts.norms:
            if _is_norm(norm):
                _replace_norm(norm, feeds=False)


def is_product(forward: object) -> bool:
    """Whether it stands in the place of an `nn.Linear`'s own forward, and computes the same."""
    lean = isinstance(forward, partial) and forward.func is _linear
    return lean and not cast(partial[Tensor], forward).keywords["turned"]


def _replace(module: nn.Module, forward: Any) -> None:
    module.forward = partial(forward, module)


def _is_plain(module: nn.Module) -> bool:
    """Return whether it is a Linear of torch's own, or the like, whose weight is not quantised."""
    own = type(module) is nn.Linear or type(module).__name__ in OWN_PRODUCTS
    return own and type(module.weight) is nn.Parameter


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _replace_norm(norm: nn.Module, *, feeds: bool) -> None:
    """feeds: whether products read the output itself, and not a view of it."""
    name = type(norm).__name__
    if name.endswith("LayerNorm"):
        _replace(norm, partial(_layer_norm, feeds=feeds))
        return
    kind: Normalise = normalise
    if name.startswith("Gemma"):
        kind = normalise_unit
    elif name.startswith(("Olmo2", "Olmo3")):
        kind = normalise_wide
    _replace(norm, partial(_rms_norm, kind=kind, feeds=feeds))


def _replace_activation(module: nn.Module, curve: str) -> None:
    """That of a feed-forward, where `module` is one, with a gate's product."""
    if isinstance(getattr(module, "gate_up_proj", None), nn.Module):
        _replace(module, partial(_fused_mlp, curve=curve))
    elif hasattr(module, "gate_proj"):
        _replace(module, partial(_gated_mlp, curve=curve))
    else:
        for name, child in module.named_children():
            if name in PLAIN:
                _replace(child, partial(_activation, curve=curve))


def _linear(module: nn.Module, x: Tensor, *, turned: bool) -> Tensor:
    out: Tensor = Linear.apply(x, module.weight, module.bias, find(x), turned)  # type: ignore[no-untyped-call]
    return out


def _rms_norm(module: Any, x: Tensor, *, kind: Normalise, feeds: bool) -> Tensor:
    weight, eps = module.weight, _eps(module)
    out, inverse = RmsNorm.apply(x, weight, eps, kind)  # type: ignore[no-untyped-call]
    return mark(out, kind, x, inverse, weight) if feeds else cast(Tensor, out)


def _layer_norm(module: Any, x: Tensor, *, feeds: bool) -> Tensor:
    weight, bias, eps = module.weight, getattr(module, "bias", None), _eps(module)
    out: Tensor = LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return mark(out, partial(normalise_rows, eps=eps), x, weight, bias) if feeds else out


def _eps(norm: Any) -> float:
    """What a norm adds before it divides, as its class names it."""
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def _activation(module: nn.Module, x: Tensor, *, curve: str) -> Tensor:
    out: Tensor = Activation.apply(x, curve)  # type: ignore[no-untyped-call]
    return mark(out, CURVES[curve].value, x) if out.requires_grad else out


def _gated_mlp(module: Any, x: Tensor, *, curve: str) -> Tensor:
    return _down(module, module.gate_proj(x), module.up_proj(x), curve)


def _fused_mlp(module: Any, x: Tensor, *, curve: str) -> Tensor:
    """Gate and up are halves of one projection."""
    gates, up = module.gate_up_proj(x).chunk(2, dim=-1)
    return _down(module, gates, up, curve)


def _down(module: Any, gates: Tensor, up: Tensor, curve: str) -> Tensor:
    product = GatedProduct.apply(gates, up, curve)  # type: ignore[no-untyped-call]
    out: Tensor = module.down_proj(mark(product, partial(gate, curve), gates, up))
    return out
