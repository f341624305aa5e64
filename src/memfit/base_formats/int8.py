"""Codes of 8 bits with a scale a row, and products of codes (LLM.int8, Dettmers et al. 2208.07339).

Columns of an input with a large number are multiplied in 16 bits (`quantisation.outlier_*`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, cast, final

from memfit.base_formats import BaseFormat, Held, Stored, Unpacking, base_formats, numbers
from memfit.base_formats.shared.bitsandbytes import bitsandbytes

if TYPE_CHECKING:
    from torch import Tensor, dtype

FP16 = 2  # bytes of a number
ROWWISE = 1.0 / 127.0  # codes are multiples of a row's scale / 127


@final
class Int8(BaseFormat):
    """A byte a weight, an fp32 scale a row (bitsandbytes/backends: int8_vectorwise_quant)."""

    name = "int8"
    bits = 8
    library = "bitsandbytes"
    product = "int8"
    offered = True
    unpacking_passes = 0.7  # dense in backward alone: a byte read, two written, read and written
    cut_as_numbers = False  # its integers keep their scales outside the tensor

    def tensors(self, shape: tuple[int, ...], *, double: bool) -> tuple[Stored, ...]:
        """See `BaseFormat.tensors`."""
        return Stored("weight", shape, "int8"), numbers("scales", shape[0])

    def quantising(
        self, shape: tuple[int, ...], dtype: str, width: int, *, double: bool
    ) -> list[list[int]]:
        """See `BaseFormat.quantising`: the kernel reads fp16."""
        codes, scales = (prod(t.shape) for t in self.tensors(shape, double=double))
        half = [] if dtype == "float16" else [prod(shape) * FP16]
        return [[prod(shape) * width, *half, codes, scales]]

    def unpacking(self, shape: tuple[int, ...], *, double: bool) -> Unpacking:
        """See `BaseFormat.unpacking`: the codes in another dtype, multiplied by a factor a row."""
        return Unpacking(after=(((shape[0], 1), "float32"),))

    def load_library(self) -> None:
        """See `BaseFormat.load_library`."""
        bitsandbytes()

    def quantise(self, dense: Tensor, held: Held) -> None:
        """See `BaseFormat.quantise`: bitsandbytes/nn/modules.py, Int8Params."""
        import torch

        ops = torch.ops.bitsandbytes
        codes, scales, _ = ops.int8_vectorwise_quant(dense.to(torch.float16), 0.0)
        held.weight.copy_(codes)
        held.numbers("scales").copy_(scales)

    def dequantise(self, held: Held) -> Tensor:
        """See `BaseFormat.dequantise`."""
        return unpack(held.weight, self.scales(held), held.dtype)

    def scales(self, held: Held) -> Tensor:
        """See `BaseFormat.scales`: of each row."""
        return held.numbers("scales")


def unpack(codes: Tensor, scales: Tensor, dtype: dtype) -> Tensor:
    """(rows, columns) of codes and (rows,) of scales -> the dense matrix."""
    return cast("Tensor", cast(Any, codes).to(dtype, copy=True)).mul_(
        scales.unsqueeze(1).mul(ROWWISE)
    )


base_formats.register("int8")(Int8())
