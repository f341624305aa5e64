"""Products of blocks in FP8, by torchao: e4m3 forward, e5m2 gradients, one scale a tensor.

Weights stay in fp32 and are narrowed in every product, forward and backward; what a product keeps
for its backward is its bf16 input. Without a compiler the casts are kernels of their own.
"""

from __future__ import annotations

import torch
from torch import nn

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import install_extra, quiet_import
from memfit.families import read_model
from memfit.families.capabilities.float8 import check_device, check_float8
from memfit.families.capabilities.products import is_of_block as is_narrow
from memfit.records.recipe import Recipe

PRECISION = "fp8-mixed"


def check(recipe: Recipe, device: torch.device) -> None:
    """Raise InvalidRequest where a recipe in FP8 cannot run; device: meta for any."""
    if recipe.precision != PRECISION:
        return
    beside = [f"lean: {', '.join(recipe.lean)}"] if recipe.lean else []
    beside += ["recompute: selective"] if recipe.selective_blocks else []
    check_float8(
        read_model(recipe.model), method=recipe.method, ranks=recipe.parallel.world,
        packing=recipe.packing, tokens=recipe.tokens, beside=beside,
    )  # fmt: skip
    if device.type == "cuda" and torch.cuda.is_available():
        check_device("cuda", torch.cuda.get_device_capability(device))
    elif device.type == "cpu":
        check_device("cpu", None)


def narrow(model: nn.Module, recipe: Recipe, *, emulate: bool = False) -> nn.Module:
    """Put torchao's `Float8Linear` in the place of each projection of the blocks.

    emulate: the same numbers from wider products, on devices without FP8; for tests.
    Raises InvalidRequest where torchao is not installed.
    """
    if recipe.precision != PRECISION:
        return model
    try:
        with quiet_import():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise InvalidRequest(
            "`precision: fp8-mixed` needs torchao, which is not installed",
            hint=f"{install_extra('train')}, or use `precision: bf16-mixed`",
        ) from None
    names = {w.name.rpartition(".")[0] for w in read_model(recipe.model).weights if is_narrow(w)}
    made: nn.Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, name: name in names,
    )
    return made
