"""A measurement of the card in the clock: curves of `memfit calibrate` before anybody's constants.

They are the user's, or for memfit's own step those that memfit measured of such a card itself
(`catalog/measured_rates.json`).

A product's or an attention's rate is read off its curve at the FLOP of one call, between two points
in proportion to the logarithm of the size; beyond the ends the end holds. A curve that lies higher
everywhere therefore never makes anything slower.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import NamedTuple

from memfit.catalog.measured_rates import MeasuredRates, read_measured
from memfit.plan.step_time.arrays import Number
from memfit.plan.step_time.communication.collectives import (
    Group,
    Links,
    bus_factor,
    collective_seconds,
)
from memfit.records.hardware import Device

Points = tuple[tuple[float, float], ...]  # (size, rate), sizes rising
# Host seconds of an operation inside a model over those of one small operation after another:
# what modules, autocast, autograd and views take in Python and in torch's dispatcher. Read off
# three rollouts on an H100, whose decoding took 26.6 to 28.1 us an operation where a small one took
# 10.2 (docs/gpu.md); steps are not fitted, and docs/LOG.md has the same ratio of a processor.
AROUND = 2.67
NAMES = {"products": "products", "attention": "attention", "memory": "memory",
         "launch": "launches", "host": "copies to the host", "reduced": "all_reduce"}  # fmt: skip


class Own(NamedTuple):
    """What was measured of a device; what is empty or 0 nobody did."""

    products: Points = ()  # (FLOP of one product, FLOP/s) in the blocks' precision
    wide: Points = ()  # the same of the head's
    attention: Points = ()  # (FLOP of forward and backward, FLOP/s) of the recipe's kernel
    memory: float = 0.0  # bytes per second read and written, beyond any cache
    host: float = 0.0  # to the host's memory or back, the slower
    launch: float = 0.0  # s that the host takes for an operation inside a model
    reduced: Points = ()  # (bytes, bus bandwidth) of an all_reduce
    devices: int = 1  # that took part in it
    by: str = ""  # who measured, in words


def read_own(device: Device, dtype: str, wide: str, kernel: str, *, own_step: bool) -> Own:
    """The curves of a calibrated device, or memfit's of such a card; an empty Own of any other.

    own_step: whether memfit's own step runs, for which its curves are.
    """
    made, devices, by = device.calibration, 1, "your own measurement"
    if made is not None and made.date:
        found = MeasuredRates(source="", curves=device.curves, launch_seconds=made.launch_seconds)
        devices = made.devices
    elif own_step and not device.own and device.id in read_measured():
        found = read_measured()[device.id]
        by = f"memfit's measurement ({found.source})"
    else:
        return Own()
    curves = {(c.work, c.dtype, c.kernel): c.points for c in found.curves}
    copies = [curves.get((way, "", "")) for way in ("to_device", "to_host")]
    memory = curves.get(("memory", "", ""))
    return Own(
        products=curves.get(("matmul", dtype, ""), ()), wide=curves.get(("matmul", wide, ""), ()),
        attention=curves.get(("attention", wide, kernel), ()),
        memory=memory[-1][1] if memory else 0.0,
        host=min(copy[-1][1] for copy in copies if copy) if all(copies) else 0.0,
        # a processor's operations take their own time beside, which bytes and FLOP count
        launch=(found.launch_seconds or 0.0) * (1.0 if device.is_cpu else AROUND),
        reduced=curves.get(("all_reduce", "", ""), ()), devices=devices, by=by,
    )  # fmt: skip


def find_usual_launch() -> float:
    """Seconds of an operation inside a model on the slowest host that memfit measured; 0: none."""
    return AROUND * max(
        (found.launch_seconds or 0.0 for found in read_measured().values()), default=0.0
    )


def describe(own: Own) -> str:
    """Which of the clock's figures were measured so, in words; "" where none was."""
    return ", ".join(name for field, name in NAMES.items() if getattr(own, field))


def rate_at(points: Points, size: Number) -> Number:
    """Rate of a call of this size; both may be arrays."""
    if not getattr(size, "ndim", 0):
        return _one_rate(points, float(size))
    import numpy

    sizes, rates = numpy.array(points).T
    return numpy.interp(numpy.log(numpy.maximum(size, 1e-9)), numpy.log(sizes), rates)


def _one_rate(points: Points, size: float) -> float:
    if size <= points[0][0]:
        return points[0][1]
    for (small, low), (large, high) in pairwise(points):
        if size <= large:
            return low + (high - low) * log(size / small) / log(large / small)
    return points[-1][1]


def scale_links(links: Links, own: Own) -> Links:
    """Links inside a machine as fast as the user's largest all_reduce says they are."""
    if not own.reduced or own.devices < 2 or links.per_machine < 2:
        return links
    nbytes, bus = own.reduced[-1]
    group = Group(own.devices, own.devices)
    seconds = collective_seconds("all_reduce", nbytes, group, links)
    ratio = bus * seconds / (nbytes * bus_factor("all_reduce", own.devices))
    return links._replace(inside=links.inside * ratio, in_switch=links.in_switch * ratio)
