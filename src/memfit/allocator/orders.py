"""The orders in which addresses come from the driver, which break ties between free blocks.

Of free blocks of one size the lowest address is taken, and nothing says what cudaMalloc returns
next: on an H100 the first segments came below each other, later ones above those, and some in the
gaps between (bench/results/gpu/recordings.tar). One rising order is the typical one; a range comes
from these others, which bench/orders.py holds against shuffled addresses. They are of segments
above 2 MiB: those of the small pool stay as they are, and are compared with no others. Expandable
segments need none: a pool has one range of addresses, whoever lies below whom.
"""

from __future__ import annotations

SEGMENTS = 1 << 20  # of one pool, at most: 20 TB of the smallest large ones
RISING = 1
FALLING = -1
SCATTERED = 648055  # of SEGMENTS the golden section: each next to none of those before it
OTHERS = (FALLING, SCATTERED)


def find_place(number: int, order: int) -> int:
    """Where the `number`th segment, counted from 1, lies among all of them.

    order: an odd number; none of SEGMENTS in turn then has the place of another one.
    """
    return number * order % SEGMENTS
