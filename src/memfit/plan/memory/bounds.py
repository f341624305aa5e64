"""From a framework's peak to what the device must have: a band, of one recipe or of many."""

from __future__ import annotations

from typing import NamedTuple

from memfit.catalog.overheads import Overhead, find_outside
from memfit.plan.frameworks import Framework
from memfit.plan.step_time.arrays import Number, rounded
from memfit.records.hardware import Device
from memfit.records.recipe import Parallel


class Bounds(NamedTuple):
    """Bytes of the whole device; `total`, `low` and `high` are None where the context is unknown.

    At or below a limit, `high` fits for certain; above it, `low` does not.
    """

    reserved: Number
    low: Number
    total: Number
    high: Number
    outside: Overhead | None  # what is not the allocator's


def find_bounds(framework: Framework, device: Device, parallel: Parallel, peak: Number) -> Bounds:
    """The band around a peak; peak and parallel: of one recipe, or arrays of many."""
    slack = framework.slack
    reserved = rounded(peak * slack.typical)
    outside = _find_outside(framework, device, parallel)
    if outside is None:
        return Bounds(reserved, None, None, None, None)
    return Bounds(
        reserved=reserved,
        low=peak * slack.low + outside.low,
        total=reserved + outside.typical,
        high=peak * slack.high + outside.high,
        outside=outside,
    )


def _find_outside(framework: Framework, device: Device, parallel: Parallel) -> Overhead | None:
    """The context with its communicators; None where it is unknown for one of the recipes."""
    groups: Number = framework.count_groups(parallel)
    if not getattr(groups, "ndim", 0):
        return find_outside(device, parallel, groups)
    import numpy

    rows = numpy.bincount(groups)
    known = [find_outside(device, parallel, count) for count in range(len(rows))]
    needed = [known[count] for count in numpy.flatnonzero(rows)]
    first = needed[0]
    if first is None or None in needed:
        return None
    bands: dict[str, Number] = {
        name: numpy.array([getattr(row, name, 0) for row in known])[groups]
        for name in ("low", "typical", "high")
    }
    return Overhead(**bands, source=first.source, verified=first.verified, like=first.like)
