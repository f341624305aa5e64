"""Bytes of weights that bitsandbytes stores in 4 or 8 bits, in its own modules.

Source: bitsandbytes 0.41.1 to 0.50, nn/modules.py (Params4bit, Linear8bitLt).
"""

from __future__ import annotations

from memfit.records.quantised import DOUBLE, stored_bytes

TABLE = 16 * 4  # of nf4 or fp4 itself, one a weight's state: memfit's own step has none


def four_bit_bytes(numel: int, *, double: bool) -> int:
    """Packed codes, their scales and a table; double: the scales are stored in 8 bits themselves.

    Dettmers et al. 2305.14314, section 3: 4 + 32/64 = 4.5 bits a weight, or 4.127 with double
    quantisation.
    """
    return stored_bytes("nf4" + (DOUBLE if double else ""), (numel, 1)) + TABLE


def eight_bit_bytes(rows: int, columns: int) -> int:
    """LLM.int8 (Dettmers et al. 2208.07339): one byte a weight and one fp32 scale a row."""
    return stored_bytes("int8", (rows, columns))
