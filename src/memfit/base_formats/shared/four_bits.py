"""Codes of 4 bits in blocks of 64 as bitsandbytes has them (QLoRA, Dettmers et al. 2305.14314).

Layout and block sizes are bitsandbytes' (functional.py: quantize_4bit, quantize_blockwise). Its
table of the 16 values is not stored with a matrix: the kernels know it by name.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, cast, final

from memfit.base_formats import FP32, BaseFormat, Held, Stored, Unpacking, numbers
from memfit.base_formats.shared.bitsandbytes import bitsandbytes, scale_codes

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64  # weights that share one scale
SCALES_BLOCK = 256  # scales that share one of their own, where they are quantised again
TABLE = 256  # values of the 8-bit type that scales are quantised to
FUSED_ROWS = 4  # up to so many rows of an input, one kernel unpacks and multiplies
# The same limit for matrices of 4 million weights or more, by CUDA's compute capability: the least
# that bitsandbytes 0.50.2 has for any such shape (_gemm_4bit_use_custom_cuda).
MOST_FUSED = {"7.5": 32, "8.0": 5, "8.6": 16, "8.9": 8, "9.0": 5, "12.0": 8, "12.1": 12}


@final
class FourBits(BaseFormat):
    """Two weights a byte; a scale for 64 of them in fp32 (2305.14314, section 3).

    double: that scale in a byte, with an fp32 scale for 256 of them, their mean and a table of 256
    values: 4.127 bits a weight in place of 4.5.
    """

    bits = 4
    library = "bitsandbytes"
    doubles = True
    multiplies = True
    codes_experts = True  # block after block, whatever the shape
    most_weights = 2**31 - 1  # bitsandbytes counts them in 32 bits
    unpacking_passes = 0.4  # half a byte read, two written, scales
    why_not_compiled = "the certificate cannot cut"

    def __init__(self, name: str, *, offered: bool) -> None:
        self.name, self.offered = name, offered

    def tensors(self, shape: tuple[int, ...], *, double: bool) -> tuple[Stored, ...]:
        """See `BaseFormat.tensors`."""
        blocks = count_blocks(shape)
        codes = Stored("weight", (-(-prod(shape) // 2), 1), "uint8")
        if not double:
            return codes, numbers("absmax", blocks)
        return (
            codes,
            Stored("absmax", (blocks,), "uint8"),
            numbers("nested_absmax", -(-blocks // SCALES_BLOCK)),
            numbers("nested_table", TABLE),
            numbers("offset", 1),
        )

    def quantising(
        self, shape: tuple[int, ...], dtype: str, width: int, *, double: bool
    ) -> list[list[int]]:
        """See `BaseFormat.quantising`; the scales and their distance from the mean are fp32."""
        made = {t.leaf: prod(t.shape) for t in self.tensors(shape, double=double)}
        dense = prod(shape) * width
        if not double:
            return [[dense, made["weight"], made["absmax"]]]
        scales = count_blocks(shape) * FP32
        parts = (
            made["weight"], scales, made["offset"], scales, made["absmax"], made["nested_absmax"]
        )  # fmt: skip
        return [[dense, made["nested_table"]], [dense, *parts]]

    def unpacking(self, shape: tuple[int, ...], *, double: bool) -> Unpacking:
        """See `BaseFormat.unpacking`: scales that are quantised too are dequantised first."""
        return Unpacking(before=(((count_blocks(shape),), "float32"),)) if double else Unpacking()

    def kernel_bytes(self, shape: tuple[int, ...], tokens: int, width: int, *, double: bool) -> int:
        """See `BaseFormat.kernel_bytes`."""
        return multiply_bytes(shape, tokens, width, double=double)

    def fused_rows(self, capability: str | None) -> int:
        """See `BaseFormat.fused_rows`; a CPU's products are made with dense weights."""
        return MOST_FUSED.get(capability, FUSED_ROWS) if capability else 0

    def load_library(self) -> None:
        """See `BaseFormat.load_library`."""
        bitsandbytes()

    def quantise(self, dense: Tensor, held: Held) -> None:
        """See `BaseFormat.quantise`: bitsandbytes/functional.py, quantize_4bit.

        This calls the operators, because the functions around them cache a table on one device.
        """
        import torch

        ops, tensors = torch.ops.bitsandbytes, cast(Any, held)
        if held.doubled:
            held.numbers("nested_table").copy_(torch.tensor(scale_codes()))
        codes, absmax = ops.quantize_4bit(dense, BLOCK, self.name, torch.uint8)
        held.weight.copy_(codes)
        if not held.doubled:
            held.numbers("absmax").copy_(absmax)
            return
        offset = absmax.mean()
        table = held.numbers("nested_table")
        scales, nested = ops.quantize_blockwise(absmax - offset, table, SCALES_BLOCK)
        tensors.absmax.copy_(scales)
        held.numbers("nested_absmax").copy_(nested)
        held.numbers("offset").copy_(offset)

    def dequantise(self, held: Held) -> Tensor:
        """See `BaseFormat.dequantise`.

        The matrix is passed as one long row: on CPUs with AVX-512, bitsandbytes 0.50 assumes that
        a block begins with each row, and returns wrong weights where 64 does not divide `in`.
        """
        import torch

        ops, scales = torch.ops.bitsandbytes, self.scales(held)
        if held.doubled:
            nested, table = held.numbers("nested_absmax"), held.numbers("nested_table")
            scales = ops.dequantize_blockwise(scales, nested, table, SCALES_BLOCK, torch.float32)
            scales += held.numbers("offset")
        row = (1, prod(held.shape))
        dense = ops.dequantize_4bit(held.weight, scales, BLOCK, self.name, row, held.dtype)
        return cast("Tensor", dense).view(held.shape)

    def scales(self, held: Held) -> Tensor:
        """See `BaseFormat.scales`: of each block."""
        return cast("Tensor", cast(Any, held).absmax) if held.doubled else held.numbers("absmax")

    def multiply(self, x: Tensor, held: Held, bias: Tensor | None) -> Tensor:
        """See `BaseFormat.multiply`: `matmul_4bit`, with what bitsandbytes calls a state."""
        import torch

        make = bitsandbytes().functional.QuantState
        nested = None
        if held.doubled:
            nested = make(
                absmax=held.numbers("nested_absmax"), code=held.numbers("nested_table"),
                blocksize=SCALES_BLOCK, dtype=torch.float32,
            )  # fmt: skip
        state = make(
            absmax=self.scales(held), shape=torch.Size(held.shape),
            blocksize=BLOCK, quant_type=self.name, dtype=held.dtype,
            offset=held.numbers("offset").view(()) if nested else None, state2=nested,
        )  # fmt: skip
        return cast("Tensor", bitsandbytes().matmul_4bit(x, held.weight, state, bias=bias))


def count_blocks(shape: tuple[int, ...]) -> int:
    """Return how many scales a matrix has."""
    return -(-prod(shape) // BLOCK)


def multiply_bytes(shape: tuple[int, ...], tokens: int, width: int, *, double: bool) -> int:
    """Return the bytes of `gemm_4bit` on CUDA: the dense weight; with `double` its scales twice.

    Return 0 where a fused kernel needs neither; up to 1536 rows that depends on the device.
    """
    if tokens <= FUSED_ROWS and shape[1] % BLOCK == 0:
        return 0
    return prod(shape) * width + (2 * count_blocks(shape) * FP32 if double else 0)
