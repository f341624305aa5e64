"""Buffers of FSDP2 (`fully_shard`), from torch 2.13's `fsdp/_fully_shard/_fsdp_collectives.py`.

Each unit is gathered into one flat output, copied out into whole weights, and reduced from one
flat input. Gathers allocate on a stream of their own and reductions put their outputs on another:
blocks of one stream's pool serve no other, so both pools add to reserved memory for good.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.plan.step_time.arrays import Number, larger, where


class Unit(NamedTuple):
    """`fully_shard` units of a rank that are alike, in a row; after tensor parallelism."""

    elements: Number  # of one
    stays: Number  # whole from its forward to its backward (`reshard_after_forward=False`)
    count: Number = 1  # none where the next ones in the row have the same elements


class Buffers(NamedTuple):
    """Bytes, of the rank's units in forward order."""

    whole: Number  # weights that stay whole after the forward
    gather_pool: Number  # flat outputs of gathers that were alive together, and a cast share
    reduce_inputs: Number  # of a backward's first two reductions: a second keeps the first's


def gathered(units: tuple[Unit, ...], parameter: int, reduced: int, shards: Number) -> Buffers:
    """What gathering in `parameter` bytes an element and reducing in `reduced` bytes takes.

    shards: ranks that share each weight; a rank's own share is cast before it is gathered.
    A gather's output lives until the next copy-out, and a reduction's input until the next
    reduction, so that two in a row are alive together. (Later reductions of a backward find the
    activations gone.)
    """

    def alive(a: Number, b: Number) -> Number:
        return a + b + larger(a, b) // shards

    whole: Number = 0
    most: Number = 0
    before: Number = 0  # the unit before the last one of those so far
    last: Number = 0
    for unit, after in zip(units, (*units[1:], Unit(0, False)), strict=True):
        here = unit.elements
        whole += where(unit.stays, unit.count * here, 0)
        pair = where(unit.count > 1, alive(here, here), 0)
        most = larger(most, where(unit.count > 0, larger(pair, alive(here, after.elements)), 0))
        before = where(unit.count > 1, here, where(unit.count > 0, last, before))
        last = where(unit.count > 0, here, last)
    return Buffers(parameter * whole, parameter * most, reduced * (before + last))
