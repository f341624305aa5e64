"""How many operations torch runs in one more block of memfit's own step, by family.

They decide how long the host takes where it is slower than the device. `scripts/
count_operations.py` writes the file from tiny models, as torch's dispatcher counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from memfit.records import Record, from_data

FILE = Path(__file__).parents[3] / "catalog" / "operations.json"
USUAL = "llama"  # whose counts stand for families that are not counted
# fp32 weights that are cast for each product; weights of 16 bits; all in fp32
Way = Literal["cast", "half", "fp32"]


class Operations(Record, frozen=True, kw_only=True):
    """Operations that are no views, of one block."""

    step: int  # a micro-batch's forward and backward, whole training, nothing computed again
    decode: int  # one new token of all rows


class Counted(Record, frozen=True, kw_only=True):
    """Those of a family, by how its weights are stored; see `Way`."""

    cast: Operations
    half: Operations
    fp32: Operations


@cache
def read_operations() -> Mapping[str, Counted]:
    """Of all counted families."""
    rows = msgspec.json.decode(FILE.read_bytes())
    return {name: from_data(row, Counted, source=str(FILE)) for name, row in rows.items()}


def find_operations(family: str, way: Way) -> Operations:
    """Those of a family, by how its weights are stored."""
    counts = read_operations()
    found: Operations = getattr(counts.get(family, counts[USUAL]), way)
    return found
