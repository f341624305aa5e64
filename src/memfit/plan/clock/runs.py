"""What neighbouring candidates of a search have in common is worked out once for all of them.

A search crosses meshes with micro-batches, and these with recomputing and stages, so that rows of
one mesh stand side by side, and so do those of one micro-batch: 3.2 million candidates of a mixture
on 16,384 devices have 56 thousand meshes. Nothing relies on that order but the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.plan.clock.arrays import Number
from memfit.plan.clock.rates import Setting

# what no block of one micro-batch depends on, and what nothing after the last one does
BLOCKS_DO_NOT_READ = (
    "accumulation", "chunks", "repeated", "selective", "most", "last", "balanced", "stowed",
)  # fmt: skip
MESHES_DO_NOT_READ = (*BLOCKS_DO_NOT_READ, "sequence", "micro_batch", "sequence_parallel")


def over_runs(
    function: Callable[[Setting], tuple[Number, ...]], setting: Setting, unread: tuple[str, ...]
) -> tuple[Number, ...]:
    """function(setting), once for each run of rows that are alike but in what it does not read.

    Arrays named `unread` are None to it: reading one raises and does not go wrong in silence.
    """
    arrays = {name: value for name, value in setting.layout._asdict().items() if _plural(value)}
    shape, _, machine, rates = setting
    if not arrays or any(map(_plural, (*shape, *machine, *machine.links, *rates))):
        return function(setting)  # one candidate; or not one model on one kind of device
    import numpy

    rows = len(next(iter(arrays.values())))
    new = numpy.zeros(rows, bool)
    new[:1] = True
    for name in arrays.keys() - set(unread):
        new[1:] |= arrays[name][1:] != arrays[name][:-1]
    starts = numpy.flatnonzero(new)
    alone = 2 * len(starts) > rows  # to work out every row costs less than to thin them out
    read: dict[str, Any] = {
        name: None if name in unread else value if alone else value[starts]
        for name, value in arrays.items()
    }
    found = function(setting._replace(layout=setting.layout._replace(**read)))
    if alone:
        return found
    lengths = numpy.diff(starts, append=rows)
    return tuple(numpy.repeat(each, lengths) if _plural(each) else each for each in found)


def _plural(value: object) -> bool:
    return bool(getattr(value, "ndim", 0))
