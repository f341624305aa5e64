"""What a matrix is stored as when it is quantised: which tensors, in numbers.

Layout and block sizes are bitsandbytes' (functional.py: quantize_4bit, quantize_blockwise;
backends: int8_vectorwise_quant), whose kernels write and read these tensors. The table of the 16
values of nf4 or fp4 is not among them: the kernels know it by name. fp32 numbers are kept as their
bytes, of which FSDP2 gathers each as it is: it would cast fp32 to what it computes in, which rounds
every weight of a row or block by up to 0.4 %.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

CODED_FORMATS = ("int8", "nf4", "fp4")
DOUBLE = "-double"  # ends a coding whose scales are quantised themselves
BLOCK = 64  # weights that share one scale
SCALES_BLOCK = 256  # scales that share one of their own, where they are quantised again
FP32 = 4  # bytes of a number
TABLE = 256  # values of the 8-bit type that scales are quantised to


class Stored(NamedTuple):
    """One tensor of a quantised matrix, under its name inside the module."""

    leaf: str
    shape: tuple[int, ...]
    dtype: str


def name_coding(base_format: str, *, double: bool) -> str:
    """`int8`, `nf4`, `nf4-double`, …; "" for a plain format."""
    if base_format not in CODED_FORMATS:
        return ""
    return base_format + (DOUBLE if double and base_format != "int8" else "")


def stored_tensors(coding: str, shape: tuple[int, ...]) -> tuple[Stored, ...]:
    """The tensors that hold a matrix (rows, columns).

    int8 (Dettmers et al. 2208.07339): a byte a weight, an fp32 scale a row. 4 bits (QLoRA,
    2305.14314, section 3): two weights a byte, a scale for 64 of them in fp32; `-double`: that
    scale in a byte, with an fp32 scale for 256 of them, their mean and a table of 256 values.
    """
    if coding == "int8":
        return (
            Stored("weight", shape, "int8"),
            _numbers("scales", shape[0]),
        )
    count = prod(shape)
    blocks = -(-count // BLOCK)
    codes = Stored("weight", (-(-count // 2), 1), "uint8")
    if not coding.endswith(DOUBLE):
        return codes, _numbers("absmax", blocks)
    return (
        codes,
        Stored("absmax", (blocks,), "uint8"),
        _numbers("nested_absmax", -(-blocks // SCALES_BLOCK)),
        _numbers("nested_table", TABLE),
        _numbers("offset", 1),
    )


def _numbers(leaf: str, count: int) -> Stored:
    """So many fp32 numbers, a row of four bytes each."""
    return Stored(leaf, (count, FP32), "uint8")


def stored_bytes(coding: str, shape: tuple[int, ...]) -> int:
    """Bytes of all of them."""
    return sum(prod(t.shape) for t in stored_tensors(coding, shape))  # all are of one byte
