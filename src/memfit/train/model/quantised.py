"""Frozen projections and experts that are stored as codes, as a `memfit.base_formats` says.

A `Quantised` module holds plain tensors, so that it is built on meta, traced, counted and replaced
as every other module is; bitsandbytes' own modules quantise in `Tensor.to` and cannot hold fake
tensors. It has nothing of its own in numbers: what is stored is what the format's library makes,
and products are the library's. Experts, for which it has no product, are made dense for torch's
grouped one, all of a layer at once, so that no size depends on which of them are chosen.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from memfit.adapters.shared.peft_layers import PREFIX
from memfit.adapters.shared.quantised_base import stores_codes
from memfit.base_formats import find_base_format, find_coding, stored_tensors
from memfit.base_formats.int8 import unpack
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.parallelism.whole import whole
from memfit.records.recipe import Recipe


def quantise(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Put a `QuantisedLinear` in the place of each projection that the recipe quantises, and
    `QuantisedExperts` in that of each parameter of all experts of a layer.

    model: bare, on the meta device. Raises InvalidRequest where the format's library is not
    installed, and ValueError (our bug) where a matrix that is to be quantised is no Linear's.
    """
    if not recipe.coding:
        return model
    find_base_format(recipe.base_format).load_library()
    for row in read_model(recipe.model).weights:
        if not stores_codes(row, recipe.base_format):
            continue
        path, _, leaf = row.name.rpartition(".")
        if row.routed:
            experts = model.get_submodule(path)
            delattr(experts, leaf)
            experts.add_module(leaf, QuantisedExperts(row.shape, recipe))
            continue
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        if leaf != "weight" or not isinstance(old, nn.Linear):
            raise ValueError(f"`{row.name}` is to be quantised and is no Linear")
        setattr(model.get_submodule(parent), name, QuantisedLinear(old, recipe))
    return model


class Quantised(nn.Module):
    """A frozen weight in 8 or 4 bits: (out, in), or (experts, rows, columns)."""

    weight: Tensor

    def _hold(self, shape: tuple[int, ...], recipe: Recipe) -> None:
        self.shape = shape
        self.coding = recipe.coding
        self.format, self.doubled = find_coding(recipe.coding)
        self.dtype = getattr(torch, recipe.frozen_dtype)  # of the weight where it is dense
        for leaf, held, dtype in stored_tensors(self.coding, shape):
            empty = torch.empty(held, dtype=getattr(torch, dtype), device="meta")
            self.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.shape}, coding={self.coding}"

    def stored(self) -> dict[str, nn.Parameter]:
        """The tensors of the weight, by their names here."""
        made = stored_tensors(self.coding, self.shape)
        return {leaf: cast(nn.Parameter, getattr(self, leaf)) for leaf, *_ in made}

    def numbers(self, leaf: str) -> Tensor:
        """Stored fp32 numbers (n,), a view of their bytes.

        Raises InvalidRequest where FSDP2 gathered the bytes as other numbers.
        """
        held = cast(Tensor, getattr(self, leaf))
        if held.dtype != torch.uint8:
            raise InvalidRequest(
                f"FSDP2 of torch {torch.__version__} gathers bytes as {held.dtype}, of which"
                f" `base_format: {self.format.name}` makes no weights",
                hint="use torch 2.13, or one device",
            )
        return held.view(torch.float32).view(-1)

    def factors(self) -> Tensor:
        """One of each row or block, or its code where scales are quantised, too."""
        return self.format.scales(self)

    def empty_dense(self) -> Tensor:
        """Where the dense weight is put before `store`."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.weight.device)

    def store(self, dense: Tensor) -> None:
        """Quantise a dense weight that is where this module's tensors are; of shards, the whole of
        it, of which a rank keeps its own: blocks and their mean know no ranks.
        """
        own = self.stored()  # and no bias, which has its values already
        with torch.no_grad(), torch.device(dense.device), whole(self, only=own):
            self.format.quantise(dense, self)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The weight that the codes stand for."""
        return self.format.dequantise(self)


class QuantisedExperts(Quantised):
    """A projection of all experts of a layer, as Hugging Face's class stores it."""

    def __init__(self, shape: tuple[int, ...], recipe: Recipe) -> None:
        super().__init__()
        self._hold(shape, recipe)

    def multiply(self, x: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
        """(rows, in) -> (rows, out): each group of rows, which ends where `ends` (experts,) says,
        with its expert's matrix; transposed: stored as (experts, in, out)."""
        low = _lower(x)
        with torch.autocast(x.device.type, enabled=False):
            return cast(Tensor, _GroupedProduct.apply(low, ends, self, transposed))  # type: ignore[no-untyped-call]


class QuantisedLinear(Quantised, nn.Linear):
    """(..., in) -> (..., out) with a frozen weight in 8 or 4 bits, in the dtype of autocast, or of
    the input where there is none.
    """

    def __init__(self, old: nn.Linear, recipe: Recipe) -> None:
        nn.Module.__init__(self)  # the dense weight of nn.Linear's own is what must not be made
        self.in_features, self.out_features = old.in_features, old.out_features
        self.threshold = recipe.quantisation.outlier_threshold
        self.bias = old.bias
        self.most_outliers = 0  # columns of one input that held outliers, so far
        self.outliers = self.columns = 0  # the same in sum, and of how many columns
        self._hold((old.out_features, old.in_features), recipe)

    def store(self, dense: Tensor) -> None:
        """See `Quantised.store`."""
        self.most_outliers = self.outliers = self.columns = 0
        super().store(dense)

    def forward(self, x: Tensor) -> Tensor:
        """See the class. Autocast is off inside: some of the kernels are written with torch."""
        rows = _lower(x)
        if x.dim() != 2:
            rows = rows.reshape(-1, self.in_features)
        with torch.autocast(x.device.type, enabled=False):
            product = self._multiply(rows)
        return product if x.dim() == 2 else product.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.format.product == "int8":
            return self._eight(x)
        if x.device.type == "cpu" or not self.format.multiplies:
            return cast(Tensor, _DenseProduct.apply(x, self))  # type: ignore[no-untyped-call]
        return self.format.multiply(x, self, self.bias)

    def _eight(self, x: Tensor) -> Tensor:
        product, outliers = cast(
            tuple[Tensor, int | None],
            _Int8Product.apply(x, self.weight, self.factors(), self.bias, self.threshold),  # type: ignore[no-untyped-call]
        )
        if outliers is not None:
            self.most_outliers = max(self.most_outliers, outliers)
            self.outliers += outliers
            self.columns += self.in_features
        return product


def _lower(x: Tensor) -> Tensor:
    """In the dtype of autocast, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _DenseProduct(torch.autograd.Function):
    """A product on a CPU with a weight that is dequantised in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantisedLinear) -> Tensor:
        """(tokens, in) -> (tokens, out)."""
        ctx.linear = linear
        return nn.functional.linear(x, linear.dense(), linear.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Of the input alone."""
        return torch.matmul(grad, ctx.linear.dense()), None


class _GroupedProduct(torch.autograd.Function):
    """`grouped_mm` with experts that are dequantised in the forward and in the backward.

    What is saved is where the groups end, so that recomputation keeps no dense weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, experts: QuantisedExperts, transposed: bool
    ) -> Tensor:
        """(rows, in) -> (rows, out)."""
        ctx.save_for_backward(ends)
        ctx.experts, ctx.transposed = experts, transposed
        dense = experts.dense()
        return grouped_mm(x, dense if transposed else dense.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Of the input alone."""
        (ends,) = ctx.saved_tensors
        dense = ctx.experts.dense()
        weight = dense.transpose(-2, -1) if ctx.transposed else dense
        return grouped_mm(grad, weight, offs=ends), None, None, None


class _Int8Product(torch.autograd.Function):
    """LLM.int8's product (2208.07339): int8 where columns are tame, 16 bits where they are not.

    As bitsandbytes' `MatMul8bitLt`, which it equals bit by bit, on a CPU too; but that one keeps
    its input in an attribute of its node, which recomputation cannot free and which no gradient
    of a frozen weight needs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, threshold: float
    ) -> tuple[Tensor, int | None]:
        """(tokens, in) -> (tokens, out), and how many columns held outliers; None: no threshold."""
        ops = torch.ops.bitsandbytes
        ctx.codes, ctx.scales = codes, scales
        rows, row_scales, columns = ops.int8_vectorwise_quant(x.to(torch.float16), threshold)
        if columns is None:
            return ops.int8_scaled_mm(rows, codes, row_scales, scales, bias, x.dtype), None
        product, _ = ops.int8_mixed_scaled_mm(x, rows, codes, row_scales, scales, columns, bias)
        return product, len(columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        """Of the input alone, through the dense weight."""
        return (
            torch.matmul(grad, unpack(ctx.codes, ctx.scales, grad.dtype)),
            None,
            None,
            None,
            None,
        )


def quantised_modules(model: nn.Module) -> dict[str, Quantised]:
    """Those of a model, by the names of their weights in Hugging Face's class."""
    found: dict[str, Quantised] = {}
    for name, module in model.named_modules():
        if isinstance(module, Quantised):
            own = name.removeprefix(PREFIX).replace(".base_layer", "")
            found[own if isinstance(module, QuantisedExperts) else f"{own}.weight"] = module
    return found


def count_outliers(model: nn.Module) -> tuple[float, float] | None:
    """(mean share, largest share) of columns that held outliers, of all projections since their
    weights were stored; None where none was looked for.
    """
    projections = (m for m in quantised_modules(model).values() if isinstance(m, QuantisedLinear))
    found = [m for m in projections if m.columns]
    if not found:
        return None
    mean = sum(m.outliers for m in found) / sum(m.columns for m in found)
    return mean, max(m.most_outliers / m.in_features for m in found)
