"""Frozen projections that are stored as codes, as a `memfit.base_formats` says.

A `QuantisedLinear` holds plain tensors, so that it is built on meta, traced, counted and replaced
as every other module is; bitsandbytes' own modules quantise in `Tensor.to` and cannot hold fake
tensors. It has nothing of its own in numbers: what is stored is what the format's library makes,
and products are the library's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.adapters.shared.peft_layers import PREFIX
from memfit.adapters.shared.quantised_base import is_projection
from memfit.base_formats import find_base_format, find_coding, stored_tensors
from memfit.base_formats.int8 import unpack
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.parallelism.whole import whole
from memfit.records.recipe import Recipe


def quantise(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Put a `QuantisedLinear` in the place of each projection that the recipe quantises.

    model: bare, on the meta device. Raises InvalidRequest where the format's library is not
    installed, and ValueError (our bug) where a row that is to be quantised is no Linear.
    """
    if not recipe.coding:
        return model
    find_base_format(recipe.base_format).load_library()
    for row in read_model(recipe.model).weights:
        if not is_projection(row):
            continue
        path, _, leaf = row.name.rpartition(".")
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        if leaf != "weight" or not isinstance(old, nn.Linear):
            raise ValueError(f"`{row.name}` is to be quantised and is no Linear")
        setattr(model.get_submodule(parent), name, QuantisedLinear(old, recipe))
    return model


class QuantisedLinear(nn.Linear):
    """(..., in) -> (..., out) with a frozen weight in 8 or 4 bits, in the dtype of autocast, or of
    the input where there is none.
    """

    def __init__(self, old: nn.Linear, recipe: Recipe) -> None:
        nn.Module.__init__(self)  # the dense weight of nn.Linear's own is what must not be made
        self.in_features, self.out_features = old.in_features, old.out_features
        self.coding = recipe.coding
        self.format, self.doubled = find_coding(recipe.coding)
        self.threshold = recipe.quantisation.outlier_threshold
        self.dtype = getattr(torch, recipe.frozen_dtype)  # of the weight where it is dense
        self.bias = old.bias
        self.most_outliers = 0  # columns of one input that held outliers, so far
        self.outliers = self.columns = 0  # the same in sum, and of how many columns
        for leaf, shape, dtype in stored_tensors(self.coding, (old.out_features, old.in_features)):
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))

    def extra_repr(self) -> str:
        """For printing."""
        return f"{super().extra_repr()}, coding={self.coding}"

    def forward(self, x: Tensor) -> Tensor:
        """See the class. Autocast is off inside: some of the kernels are written with torch."""
        kind = x.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.to(low)
        if x.dim() != 2:
            rows = rows.reshape(-1, self.in_features)
        with torch.autocast(kind, enabled=False):
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

    def stored(self) -> dict[str, nn.Parameter]:
        """The tensors of the weight, by their names here."""
        made = stored_tensors(self.coding, (self.out_features, self.in_features))
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
        """Where the dense weight (out, in) is put before `store`."""
        shape = self.out_features, self.in_features
        return torch.empty(shape, dtype=self.dtype, device=self.weight.device)

    def store(self, dense: Tensor) -> None:
        """Quantise a dense weight (out, in) that is where this module's tensors are; of shards, the
        whole of it, of which a rank keeps its own: blocks and their mean know no ranks.
        """
        self.most_outliers = self.outliers = self.columns = 0
        with torch.no_grad(), torch.device(dense.device), whole(self):
            self.format.quantise(dense, self)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The weight (out, in) that the codes stand for."""
        return self.format.dequantise(self)


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


def quantised_modules(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Those of a model, by the names of their weights in Hugging Face's class."""
    return {
        name.removeprefix(PREFIX).replace(".base_layer", "") + ".weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear)
    }


def count_outliers(model: nn.Module) -> tuple[float, float] | None:
    """(mean share, largest share) of columns that held outliers, of all projections since their
    weights were stored; None where none was looked for.
    """
    found = [m for m in quantised_modules(model).values() if m.columns]
    if not found:
        return None
    mean = sum(m.outliers for m in found) / sum(m.columns for m in found)
    return mean, max(m.most_outliers / m.in_features for m in found)
