"""What candidates of a search have in common is worked out once for all of them.

A search crosses meshes with micro-batches, and these with recomputing and stages: 3.2 million
candidates of a mixture on 16,384 devices have 56 thousand meshes, and the passes of a block only
some thousand different times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from memfit.plan.step_time.arrays import PLAIN, Number, change, list_numbers
from memfit.plan.step_time.rates import Setting

# what no block of one micro-batch depends on, and what nothing after the last one does
BLOCKS_DO_NOT_READ = (
    "accumulation", "chunks", "repeated", "selective", "most", "last", "balanced", "stowed",
    "dp", "shard", "zero",
)  # fmt: skip
MESHES_DO_NOT_READ = (
    "accumulation", "chunks", "repeated", "selective", "most", "last", "balanced", "stowed",
    "sequence", "micro_batch", "sequence_parallel",
)  # fmt: skip


def once(
    function: Callable[[Setting], tuple[Number, ...]], setting: Setting, unread: tuple[str, ...]
) -> tuple[Number, ...]:
    """function(setting), once for all rows that are alike but in what it does not read.

    Arrays named `unread` are None to it: reading one raises and does not go wrong in silence.
    """
    numbers = list_numbers(setting.layout)
    if PLAIN.issuperset(map(type, numbers.values())):
        return function(setting)  # one candidate, which most searches ask for
    arrays = {name: value for name, value in numbers.items() if _plural(value)}
    shape, _, machine, rates = setting
    if not arrays or any(map(_plural, (*shape, *machine, *machine.links, *chain(*rates)))):
        return function(setting)  # one candidate; or not one model on one kind of device
    rows = len(next(iter(arrays.values())))
    found = _distinct((value for name, value in arrays.items() if name not in unread), rows)
    read: dict[str, Any] = {
        name: None if name in unread else value if found is None else value[found[0]]
        for name, value in arrays.items()
    }
    result = function(setting._replace(layout=change(setting.layout, **read)))
    if found is None:
        return result
    return tuple(each[found[1]] if _plural(each) else each for each in result)


def _distinct(columns: Iterable[Any], rows: int) -> tuple[Any, Any] | None:
    """Where each distinct row of columns stands, and which of them every row is.

    None where they are not whole numbers of a small range, or too many to be worth it: then it
    would take sorting, and costs more than it saves.
    """
    import numpy

    code, size = numpy.zeros(rows, numpy.int64), 1
    for column in columns:
        values = column.astype(numpy.int64)
        values -= values.min()
        there = numpy.zeros(int(values.max()) + 1, bool)
        if len(there) > rows or (values + column.min() != column).any():
            return None
        there[values] = True
        rank = numpy.cumsum(there) - 1
        code = code * (rank[-1] + 1) + rank[values]
        size *= int(rank[-1]) + 1
        if size > rows:
            return None
    which = numpy.zeros(size, numpy.int64)
    which[code] = numpy.arange(rows)
    there = numpy.zeros(size, bool)
    there[code] = True
    stands = which[there]
    which[there] = numpy.arange(len(stands))
    return stands, which[code]


def _plural(value: object) -> bool:
    return bool(getattr(value, "ndim", 0))
