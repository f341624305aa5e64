"""What a matrix is stored as when it is quantised: which tensors, in numbers.

Layout and block sizes are bitsandbytes' (functional.py: quantize_4bit, quantize_blockwise;
backends: int8_vectorwise_quant), whose kernels write and read these tensors. The table of the 16
values of nf4 or fp4 is not among them: the kernels know it by name.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

CODED_FORMATS = ("int8", "nf4", "fp4")
DOUBLE = "-double"  # ends a coding whose scales are quantised themselves
BLOCK = 64  # weights that share one scale
SCALES_BLOCK = 256  # scales that share one of their own, where they are quantised again
WIDTH = {"int8": 1, "uint8": 1, "float32": 4}  # bytes
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
            Stored("scales", shape[:1], "float32"),
        )
    count = prod(shape)
    blocks = -(-count // BLOCK)
    codes = Stored("weight", (-(-count // 2), 1), "uint8")
    if not coding.endswith(DOUBLE):
        return codes, Stored("absmax", (blocks,), "float32")
    return (
        codes,
        Stored("absmax", (blocks,), "uint8"),
        Stored("nested_absmax", (-(-blocks // SCALES_BLOCK),), "float32"),
        Stored("nested_table", (TABLE,), "float32"),
        Stored("offset", (), "float32"),
    )


def stored_bytes(coding: str, shape: tuple[int, ...]) -> int:
    """Bytes of all of them."""
    return sum(prod(t.shape) * WIDTH[t.dtype] for t in stored_tensors(coding, shape))
