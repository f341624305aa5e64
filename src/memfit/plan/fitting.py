"""Of a search's candidates, those that fit with the least recomputing.

More recomputing never makes a step faster, so no other candidate that fits can be faster than the
one that differs from it in recomputing fewer blocks and fits, too: leaving it out is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.plan.bounds import find_bounds
from memfit.plan.clock.arrays import Number
from memfit.plan.columns import take
from memfit.plan.space import SLICE, Part, Space
from memfit.recipe import Recipe


def find_fitting(
    space: Space, part: Part, usable: int, *, certain: bool = True
) -> Iterator[Recipe]:
    """For each row of the part's table, the candidate that recomputes the fewest blocks and fits.

    Recipes whose numbers are arrays, in no certain order; usable: bytes of the device. certain:
    the high end of the band fits; else the low end. Where the device's context is unknown, nothing
    fits. Measures each row once, and those that may fit some log2(blocks) times.
    """
    if part.choices is None:
        for recipes in part.slices():
            fits = _fits(space, recipes, usable, certain)[0]
            if fits.any():
                yield take(recipes, fits.nonzero()[0])
        return
    for start in range(0, len(part.choices), SLICE):
        yield from _leanest(space, part, start, usable, certain)


def _fits(space: Space, recipes: Recipe, usable: int, certain: bool) -> tuple[Any, Any]:
    """Whether each candidate fits, and whether it could with less kept for the backward."""
    import numpy

    peaks = space.framework.measure(space.job(recipes))

    def within(peak: Number) -> Any:
        bounds = find_bounds(space.framework, space.device, recipes.parallel, peak)
        needed = bounds.high if certain else bounds.low
        return numpy.zeros(len(peak), bool) if needed is None else needed <= usable

    return within(peaks.peak), within(peaks.least)


def _leanest(space: Space, part: Part, start: int, usable: int, certain: bool) -> Iterator[Recipe]:
    import numpy

    rows = numpy.arange(start, min(start + SLICE, len(part.choices)))

    def fits(rows: Any, choices: Any) -> Any:
        return _fits(space, part.choose(rows, choices), usable, certain)[0]

    none = 0 * rows
    at_once, ever = _fits(space, part.choose(rows, none), usable, certain)
    yield from _chosen(part, rows[at_once], none[at_once])
    rows = rows[~at_once & ever]
    # where memory only falls: halve between a choice that does not fit and one that does
    high = part.falling[rows] - 1
    right = (high > 0) & fits(rows, high) if len(rows) else high > 0
    yield from _halve(part, rows[right], high[right], fits)
    rows, high = rows[~right], high[~right]
    while len(rows):  # the few choices beyond, one by one
        high = high + 1
        left = high < part.choices[rows]
        rows, high = rows[left], high[left]
        if not len(rows):
            break
        right = fits(rows, high)
        yield from _chosen(part, rows[right], high[right])
        rows, high = rows[~right], high[~right]


def _halve(part: Part, rows: Any, high: Any, fits: Any) -> Iterator[Recipe]:
    """The least choices that fit; of those rows, 0 does not and `high` does."""
    low = 0 * high
    while True:
        open_ = high - low > 1
        yield from _chosen(part, rows[~open_], high[~open_])
        rows, low, high = rows[open_], low[open_], high[open_]
        if not len(rows):
            return
        middle = (low + high) // 2
        right = fits(rows, middle)
        low, high = low + (middle - low) * ~right, high + (middle - high) * right


def _chosen(part: Part, rows: Any, choices: Any) -> Iterator[Recipe]:
    if len(rows):
        yield part.choose(rows, choices)
