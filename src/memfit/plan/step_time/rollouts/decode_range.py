"""The range that predicted seconds of decoding carry: what published rates say of them.

`make docs` writes `catalog/decode_errors.json` from `measurements/decoding/`, which screens and
plans read alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from memfit.records import Record, from_data

FILE = Path(__file__).parents[3] / "catalog" / "decode_errors.json"


class DecodeErrors(Record, frozen=True, kw_only=True):
    """Measured over predicted seconds of decoding, of engines that launch every operation."""

    rows: int
    low: float  # exceeded by 95 % of them
    high: float  # exceeded by 5 %
    lowest: float
    highest: float
    median: float


@cache
def read_decode_errors() -> DecodeErrors:
    """The errors as `make docs` wrote them."""
    return from_data(msgspec.json.decode(FILE.read_bytes()), DecodeErrors, source=str(FILE))


def find_decode_range(seconds: float) -> tuple[float, float, str]:
    """The least and the most seconds that are to be expected, and why the range is that wide."""
    errors = read_decode_errors()
    because = f"9 in 10 of {errors.rows} published rates lie within such a range"
    return seconds * errors.low, seconds * errors.high, because
