"""The candidates that no other one beats in everything: a Pareto front over columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_front(columns: Sequence[Any]) -> Any:
    """Rows that no other row equals or beats in every column; all columns are to be small.

    columns: arrays of equal length, of numbers; a NaN, which is unknown, is beaten by every number.
    Rows come back as an index array, sorted by the first column, then by the next. Of rows that are
    equal in all columns the first is kept.
    """
    import numpy

    known = [numpy.asarray(column, float) for column in columns]
    table = numpy.stack([numpy.where(numpy.isnan(one), numpy.inf, one) for one in known], 1)
    left = numpy.lexsort(table.T[::-1])
    if len(left) and len(columns) == 2:  # then only those below all before them stay
        second = table[left, 1]
        below = second[1:] < numpy.minimum.accumulate(second)[:-1]
        return left[numpy.concatenate([[True], below])]
    found = []
    while len(left):
        # whatever beats the first row left would stand before it
        found.append(left[0])
        left = left[(table[left] < table[left[0]]).any(1)]
    return numpy.array(found, int)
