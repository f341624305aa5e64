"""The user's own measurement in the clock: curves of `memfit calibrate` before anybody's constants.

A product's or an attention's rate is read off its curve at the FLOP of one call, between two points
in proportion to the logarithm of the size; beyond the ends the end holds. A curve that lies higher
everywhere therefore never makes anything slower.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import NamedTuple

from memfit.plan.step_time.arrays import Number
from memfit.plan.step_time.communication.collectives import (
    Group,
    Links,
    bus_factor,
    collective_seconds,
)
from memfit.records.hardware import Device

Points = tuple[tuple[float, float], ...]  # (size, rate), sizes rising
# torch operations but views of a Llama block, eager, forward and backward (tests count them)
OPERATIONS = 110
NAMES = {"products": "products", "attention": "attention", "memory": "memory",
         "launch": "launches", "host": "copies to the host", "reduced": "all_reduce"}  # fmt: skip


class Own(NamedTuple):
    """What the user measured of a device; what is empty or 0 nobody did."""

    products: Points = ()  # (FLOP of one product, FLOP/s) in the blocks' precision
    wide: Points = ()  # the same of the head's
    attention: Points = ()  # (FLOP of forward and backward, FLOP/s) of the recipe's kernel
    memory: float = 0.0  # bytes per second read and written, beyond any cache
    host: float = 0.0  # to the host's memory or back, the slower
    launch: float = 0.0  # s from one small operation to the next
    reduced: Points = ()  # (bytes, bus bandwidth) of an all_reduce
    devices: int = 1  # that took part in it


def read_own(device: Device, dtype: str, wide: str, kernel: str) -> Own:
    """The curves of a calibrated device; an empty Own of any other."""
    made = device.calibration
    if made is None:
        return Own()
    copies = [_points(device, way) for way in ("to_device", "to_host")]
    memory = _points(device, "memory")
    return Own(
        products=_points(device, "matmul", dtype), wide=_points(device, "matmul", wide),
        attention=_points(device, "attention", wide, kernel),
        memory=memory[-1][1] if memory else 0.0,
        host=min(copy[-1][1] for copy in copies) if all(copies) else 0.0,
        launch=made.launch_seconds or 0.0, reduced=_points(device, "all_reduce"),
        devices=made.devices,
    )  # fmt: skip


def describe(own: Own) -> str:
    """Which of the clock's figures are the user's own, in words; "" where none is."""
    return ", ".join(name for field, name in NAMES.items() if getattr(own, field))


def _points(device: Device, work: str, dtype: str = "", kernel: str = "") -> Points:
    found = device.curve(work, dtype, kernel)
    return found.points if found else ()


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
