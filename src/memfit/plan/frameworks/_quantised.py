"""Bytes of weights that bitsandbytes stores in 4 or 8 bits.

Source: bitsandbytes 0.41.1 to 0.50, functional.py (quantize_4bit, quantize_blockwise) and
nn/modules.py (Params4bit, Linear8bitLt).
"""

from __future__ import annotations

BLOCK = 64  # weights that share one scale
SCALES_BLOCK = 256  # scales that share one of their own, where they are quantised again
FP32 = 4
TABLE = 256 * FP32  # of the 8-bit code that quantised scales are stored in


def four_bit_bytes(numel: int, *, double: bool) -> int:
    """Packed codes and their scales; double: the scales are stored in 8 bits themselves.

    Dettmers et al. 2305.14314, section 3: 4 + 32/64 = 4.5 bits a weight, or 4.127 with double
    quantisation.
    """
    scales = -(-numel // BLOCK)
    codes = -(-numel // 2)
    table = 16 * FP32  # of nf4 or fp4 itself, one a weight's state
    if not double:
        return codes + scales * FP32 + table
    return codes + scales + -(-scales // SCALES_BLOCK) * FP32 + TABLE + table + FP32


def eight_bit_bytes(rows: int, columns: int) -> int:
    """LLM.int8 (Dettmers et al. 2208.07339): one byte a weight and one fp32 scale a row."""
    return rows * columns + rows * FP32
