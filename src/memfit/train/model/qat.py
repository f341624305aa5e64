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
import torch.distributed as dist
from torch import Tensor, nn

from memfit.families import read_model
from memfit.families.capabilities.products import is_of_block
from memfit.meta.layers.qat import GROUP
from memfit.parallelism.whole import is_sharded
from memfit.records.recipe import Recipe

BITS = {"int8": 8, "int4": 4}
SWITCH = "rounds"  # the attribute of a projection whose weight is rounded


def round_weight(weight: Tensor, qat: str, group: dist.ProcessGroup | None = None) -> Tensor:
    """(out, in) in fp32 -> the same as its codes stand for; no gradient.

    group: ranks that have the other parts of each row, where a row shares a scale.
    """
    out, into = weight.shape
    half = 2 ** (BITS[qat] - 1)
    groups = weight.view(out, -1, GROUP if qat == "int4" else into)
    scale: Tensor = torch.linalg.vector_norm(groups, float("inf"), dim=-1, keepdim=True)
    if group is not None:
        cast(Any, dist).all_reduce(scale, cast(Any, dist).ReduceOp.MAX, group=group)
    scale.div_(half - 0.5).clamp_(min=torch.finfo(torch.float32).eps)
    codes = groups * scale.reciprocal()
    codes.round_().clamp_(-half, half - 1).mul_(scale)
    return codes.view(out, into)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, qat: str, group: dist.ProcessGroup | None) -> Tensor:
        return round_weight(weight, qat, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def _round(weight: Any, qat: str) -> Tensor:
    """A weight rounded; of one that ranks share, each its part, as the whole would be."""
    if not is_sharded(weight):
        return cast(Tensor, _Rounded.apply(weight, qat, None))  # type: ignore[no-untyped-call]
    from torch.distributed.tensor import DTensor

    (place,) = weight.placements
    parts = place.is_shard(1) and qat == "int8"  # of rows; in int4 a part has scales of its own
    group = weight.device_mesh.get_group() if parts else None
    rounded = _Rounded.apply(weight.to_local(), qat, group)  # type: ignore[no-untyped-call]
    made: Tensor = DTensor.from_local(
        rounded, weight.device_mesh, [place], run_check=False, shape=weight.shape,
        stride=weight.stride(),
    )  # fmt: skip
    return made


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
            weight = _round(weight, self.qat)
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
