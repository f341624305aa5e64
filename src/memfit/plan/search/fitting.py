"""Of a search's candidates, those that fit with the least recomputing.

More recomputing never makes a step faster, so no other candidate that fits can be faster than the
one that differs from it in recomputing fewer blocks and fits, too: leaving it out is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.plan.frameworks import Peaks
from memfit.plan.frameworks.shared.columns import take
from memfit.plan.memory.bounds import find_bounds
from memfit.plan.search.candidates import SLICE, Part, Space
from memfit.records.recipe import Recipe


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
            fits = _within(space, recipes, _measure(space, recipes).peak, usable, certain)
            if fits.any():
                yield take(recipes, fits.nonzero()[0])
        return
    for start in range(0, len(part.choices), SLICE):
        yield from _leanest(space, part, start, usable, certain)


def _measure(space: Space, recipes: Recipe) -> Peaks:
    return space.framework.measure(space.job(recipes))


def _within(space: Space, recipes: Recipe, peak: Any, usable: int, certain: bool) -> Any:
    """Whether a device with these peaks is large enough."""
    import numpy

    bounds = find_bounds(space.framework, space.device, recipes.parallel, peak)
    needed = bounds.high if certain else bounds.low
    return numpy.zeros(len(peak), bool) if needed is None else needed <= usable


def _leanest(space: Space, part: Part, start: int, usable: int, certain: bool) -> Iterator[Recipe]:
    import numpy

    def fits(rows: Any, choices: Any) -> Any:
        recipes = part.choose(rows, choices)
        return _within(space, recipes, _measure(space, recipes).peak, usable, certain)

    rows = numpy.arange(start, min(start + SLICE, len(part.choices)))
    plain = part.choose(rows, 0 * rows)
    peaks = _measure(space, plain)
    at_once, ever = (
        _within(space, plain, peak, usable, certain) for peak in (peaks.peak, peaks.least)
    )
    found = [(rows[at_once], 0 * rows[at_once])]
    rows = rows[~at_once & ever]
    # where memory only falls: halve between a choice that does not fit and one that does
    high = part.falling[rows] - 1
    right = (high > 0) & fits(rows, high) if len(rows) else high > 0
    found += _halve(rows[right], high[right], fits)
    rows, high = rows[~right], high[~right]
    while True:  # the few choices beyond, one by one
        high = high + 1
        left = high < part.choices[rows]
        rows, high = rows[left], high[left]
        if not len(rows):
            break
        right = fits(rows, high)
        found.append((rows[right], high[right]))
        rows, high = rows[~right], high[~right]
    chosen, choices = (numpy.concatenate(arrays) for arrays in zip(*found, strict=True))
    if len(chosen):
        yield part.choose(chosen, choices)


def _halve(rows: Any, high: Any, fits: Any) -> list[tuple[Any, Any]]:
    """Return rows with the least choice that fits; in each row 0 does not fit and `high` does."""
    low, found = 0 * high, []
    while len(rows):
        open_ = high - low > 1
        found.append((rows[~open_], high[~open_]))
        rows, low, high = rows[open_], low[open_], high[open_]
        if len(rows):
            middle = (low + high) // 2
            right = fits(rows, middle)
            low, high = low + (middle - low) * ~right, high + (middle - high) * right
    return found
