"""Products with fp32 weights on a CPU while nothing is learned: oneDNN's, where torch asks MKL.

MKL is slow on processors that are not Intel's, above all with the few rows of a decoding step.
oneDNN reads the same weights as they lie, and torch holds no other tensors for it; docs/LOG.md has
the figures. For 16-bit weights torch asks oneDNN itself; nothing changes on other devices, nor on
ranks, which gather weights for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from memfit.train.lean import is_product

CHOSEN = ("cpu", torch.float32)  # of weights


@contextmanager
def quick_products(model: nn.Module) -> Iterator[None]:
    """Meanwhile fp32 `nn.Linear`s on a CPU are computed by oneDNN; for calls without a gradient.

    A weight is looked up in each call. Classes with a forward of their own keep it, but for the
    lean products, which save nothing where there is no gradient.
    """
    chosen = [m for m in model.modules() if _is_chosen(m)] if _is_available() else []
    before = [vars(module).get("forward") for module in chosen]
    for module in chosen:
        module.forward = partial(_multiply, module, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(chosen, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _is_available() -> bool:
    """Whether torch's fp32 products are MKL's, and oneDNN is beside it."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return both and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_chosen(module: nn.Module) -> bool:
    """Whether it is torch's own product, with numbers that lie in this process as they are."""
    if type(module).forward is not nn.Linear.forward:
        return False
    own, weight = vars(module).get("forward"), module.weight
    plain = type(weight) is nn.Parameter and (weight.device.type, weight.dtype) == CHOSEN
    return plain and (own is None or is_product(own))


def _multiply(module: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(..., columns) -> (..., rows); plain: the forward before, for autocast to 16 bits."""
    if torch.is_autocast_enabled("cpu"):
        return plain(x)
    product = cast(Callable[..., Tensor], torch.ops.mkldnn._linear_pointwise)
    return product(x, module.weight, module.bias, "none", [], "")
