"""Buffers of FSDP2 (`fully_shard`), from torch 2.13's `fsdp/_fully_shard/_fsdp_collectives.py`.

Each unit is gathered into one flat output, copied out into whole weights, and reduced from one
flat input. Gathers allocate on a stream of their own and reductions put their outputs on another:
blocks of one stream's pool serve no other, so both pools add to reserved memory for good.
"""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """One `fully_shard` unit of a rank, after tensor parallelism; elements."""

    elements: int
    kept: bool  # whole from its forward to its backward (`reshard_after_forward=False`)


class Buffers(NamedTuple):
    """Bytes, of the rank's units in forward order."""

    whole: int  # weights that stay whole after the forward
    gather_pool: int  # flat outputs of gathers that were alive together, and a cast share
    reduce_inputs: int  # flat inputs of a backward's first two reductions: a second keeps the first


def gathered(units: tuple[Unit, ...], parameter: int, reduced: int, shards: int) -> Buffers:
    """What gathering in `parameter` bytes an element and reducing in `reduced` bytes takes.

    shards: ranks that share each weight; a rank's own share is cast before it is gathered.
    A gather's output lives until the next copy-out, and a reduction's input until the next
    reduction, so that two in a row are alive together. (Later reductions of a backward find the
    activations gone.)
    """
    pairs = zip(units, (*units[1:], Unit(0, False)), strict=True)
    alive = (a.elements + b.elements + max(a.elements, b.elements) // shards for a, b in pairs)
    return Buffers(
        whole=parameter * sum(u.elements for u in units if u.kept),
        gather_pool=parameter * max(alive),
        reduce_inputs=reduced * sum(u.elements for u in units[-2:]),
    )
