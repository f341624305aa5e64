"""How rollouts on a CPU hold fp32 weights, for planner and loop: by columns, where that is quick.

oneDNN copies a weight that lies by rows into blocks in every product. One that lies by columns it
reads in place, unless its number of rows is a power of two above 256; multiples of 256 share few
places of a processor's cache. So those have 16 rows more, which nobody reads. docs/LOG.md has the
figures, and says below which sizes and lengths nothing is gained.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_TOKENS = 32  # of an answer at most: below, turning takes longer than it saves
SMALLEST = 256  # rows and columns of a weight: below, a call costs what the layout saves
CLASH = 256  # rows whose multiples are kept away from
SPARE = 16  # rows more: a line of a processor's cache
PIECES = 4  # in which a weight is turned, so that little is held beside its two copies


def find_turned_rows(shape: Sequence[int], dtype: str) -> int:
    """Rows that a weight (rows, columns) has while it lies by columns; 0: it stays as it lies."""
    if dtype != "float32" or len(shape) != 2 or min(shape) < SMALLEST:
        return 0
    rows = shape[0]
    return rows + SPARE if rows > CLASH and rows % CLASH == 0 else rows


def find_piece(rows: int) -> int:
    """Rows of a weight that are turned at once."""
    return -(-rows // PIECES)
