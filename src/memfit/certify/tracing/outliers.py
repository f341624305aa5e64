"""How many columns hold outliers, where nothing is computed: the recipe's own bound.

LLM.int8's kernels return as many columns as they find in the values, which a trace does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.base_formats import find_base_format
from memfit.meta.layers.quantised import outlier_columns
from memfit.records.recipe import Recipe


def _looks(recipe: Recipe) -> bool:
    """Whether products look for columns with outliers."""
    multiplies_codes = find_base_format(recipe.base_format).product == "int8"
    return multiplies_codes and bool(recipe.coding and recipe.quantisation.outlier_threshold)


def outlier_rules(recipe: Recipe) -> dict[Any, Callable[..., Any]]:
    """For `FastFakeMode.rules`: every projection finds as many columns as the recipe allows."""
    own = recipe.quantisation
    if not _looks(recipe):
        return {}

    def find(mode: FakeTensorMode, x: Tensor, threshold: float = 0.0) -> tuple[Tensor | None, ...]:
        """(tokens, columns) -> codes, a scale a token, the columns with outliers."""
        count = outlier_columns(x.shape[-1], own.outlier_share)
        with mode:
            codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
            scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
            if not threshold:  # a weight, which is stored
                return codes, scales, None
            return codes, scales, torch.empty(count, dtype=torch.int64, device=x.device)

    def multiply(mode: FakeTensorMode, *args: Any) -> tuple[Tensor, Tensor]:
        """x, its codes, the weight's codes, …, columns, bias -> the product, those columns of x."""
        x, rows, columns = args[0], args[2].shape[0], args[5]
        with mode:
            product = torch.empty((x.shape[0], rows), dtype=x.dtype, device=x.device)
            return product, torch.empty((x.shape[0], len(columns)), dtype=x.dtype, device=x.device)

    ops = torch.ops.bitsandbytes
    return {
        ops.int8_vectorwise_quant.default: find,
        ops.int8_mixed_scaled_mm.default: multiply,
    }


def outlier_bounds(recipe: Recipe) -> tuple[str, ...]:
    """What a reader must know of it."""
    own = recipe.quantisation
    if not _looks(recipe):
        return ()
    return (
        f"up to {own.outlier_share:.2%} of each projection's columns hold outliers (numbers of"
        f" {own.outlier_threshold:g} or more); training counts them",
    )
