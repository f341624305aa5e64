"""Products with fp32 weights on a CPU while nothing is learned: oneDNN's, where torch asks MKL.

MKL is slow on processors that are not Intel's, above all with the few rows of a decoding step.
oneDNN reads the same weights as they lie, and torch holds no other tensors for it; docs/LOG.md has
the figures. Where many steps follow, each weight's storage is replaced by one in which it lies by
columns (`families.capabilities.turned`), and by one as before at the end: never are there two
copies of more than one weight, and the parameter has the same shape and numbers meanwhile. For
16-bit weights torch asks oneDNN itself; nothing changes on other devices, nor on ranks, which
gather weights for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.families.capabilities.turned import LEAST_TOKENS, find_piece, find_turned_rows
from memfit.train.lean import is_product

CHOSEN = ("cpu", torch.float32)  # of weights
PLAIN = (nn.Parameter, FakeTensor)  # a trace's are of the second kind


@contextmanager
def quick_products(model: nn.Module, tokens: int = 0) -> Iterator[None]:
    """Meanwhile fp32 `nn.Linear`s on a CPU are computed by oneDNN; for calls without a gradient.

    tokens: that an answer may have; with few of them each weight lies as before. A weight is looked
    up in each call, but for one that lies by columns, which nobody may replace meanwhile. Classes
    with a forward of their own keep it, but for the lean products, which save nothing where there
    is no gradient.
    """
    named = dict(model.named_modules()) if _is_available() else {}
    chosen = {name: cast(nn.Linear, m) for name, m in named.items() if _is_chosen(m)}
    before = [vars(module).get("forward") for module in chosen.values()]
    turned: list[_Turned] = []
    try:
        if tokens >= LEAST_TOKENS and not torch.is_autocast_enabled("cpu"):
            _turn(chosen, turned)
        _replace(chosen.values(), {one.weight: one.wide for one in turned})
        yield
    finally:
        for module, forward in zip(chosen.values(), before, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward
        while turned:  # the last one first: no instant holds more than those of turning did
            turned.pop().turn_back()


def _replace(modules: Iterable[nn.Linear], wide: Mapping[Tensor, Tensor]) -> None:
    """Give them oneDNN's products; wide: of weights that lie by columns."""
    for module in modules:
        held = wide.get(module.weight)
        if held is None:
            vars(module)["forward"] = partial(_multiply, module, module.forward)
        else:
            vars(module)["forward"] = partial(_multiply_turned, module, held)


def _is_available() -> bool:
    """Whether torch's fp32 products are MKL's, and oneDNN is beside it."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return both and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_chosen(module: nn.Module) -> bool:
    """Whether it is torch's own product, with numbers that lie in this process as they are."""
    if type(module).forward is not nn.Linear.forward:
        return False
    own, weight = vars(module).get("forward"), module.weight
    plain = type(weight) in PLAIN and (weight.device.type, weight.dtype) == CHOSEN
    return plain and (own is None or is_product(own))


def _multiply(module: nn.Linear, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(..., columns) -> (..., rows); plain: the forward before, for autocast to 16 bits."""
    if torch.is_autocast_enabled("cpu"):
        return plain(x)
    return _product(x, module.weight, module.bias)


def _multiply_turned(module: nn.Linear, wide: Tensor, x: Tensor) -> Tensor:
    """The same by a weight that lies by columns, with the rows that nobody reads."""
    rows, bias = module.weight.shape[0], module.bias
    if len(wide) == rows:
        return _product(x, wide, bias)
    made = _product(x, wide, None)[..., :rows]
    return made if bias is None else made.add_(bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = cast(Callable[..., Tensor], torch.ops.mkldnn._linear_pointwise)
    return product(x, weight, bias, "none", [], "")


class _Turned:
    """A weight (rows, columns) that lies by columns until `turn_back`."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        """rows: with those that nobody reads."""
        count, columns = weight.shape
        # made flat: its last dimension would be the vocabulary, which results have
        held = weight.new_empty(rows * columns).view(columns, rows)
        step, before = find_piece(count), weight.detach()
        for first in range(0, count, step):
            piece = slice(first, min(first + step, count))
            # torch is quick at turning into rows that have no gaps
            held[:, piece].copy_(before[piece].t().contiguous())
        held[:, count:].zero_()
        self.weight, self.wide = weight, held.t()
        weight.data = self.wide[:count]

    def turn_back(self) -> None:
        """Make it lie by rows, as before."""
        self.weight.data = self.weight.data.contiguous()


def _turn(chosen: Mapping[str, nn.Linear], turned: list[_Turned]) -> None:
    """Turn the weights that it pays for, one after the other, each added once it is done.

    Adapters' own stay: they are narrow. So does what shares a storage, which turning would double.
    """
    for name, module in chosen.items():
        weight = module.weight
        rows = find_turned_rows(weight.shape, str(weight.dtype).removeprefix("torch."))
        alone = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
        if rows and alone and ".lora_" not in name:
            turned.append(_Turned(weight, rows))
