"""Bytes of weights that bitsandbytes stores in 4 or 8 bits, in its own modules.

Source: bitsandbytes 0.41.1 to 0.50, nn/modules.py (Params4bit, Linear8bitLt).
"""

from __future__ import annotations

from math import prod

from memfit.base_formats import find_base_format, name_coding, stored_bytes

TABLE = 16 * 4  # of nf4 or fp4 itself, one a weight's state: memfit's own step has none


def quantised_bytes(base_format: str, shape: tuple[int, ...], *, double: bool) -> int:
    """Bytes of a matrix in a module of its own; double: the scales are quantised themselves.

    Of 4 bits: packed codes, their scales and a table of the 16 values.
    """
    stored = stored_bytes(name_coding(base_format, double=double), shape)
    return stored + (TABLE if find_base_format(base_format).bits == 4 else 0)


def code_bytes(base_format: str, shape: tuple[int, ...]) -> int:
    """Of these, the codes alone."""
    return prod(find_base_format(base_format).tensors(shape, double=False)[0].shape)
