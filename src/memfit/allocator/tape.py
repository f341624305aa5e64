"""The tape: every allocation and release of a step in order, as the allocator sees them."""

from __future__ import annotations

from typing import NamedTuple

FREED = 0
USED = -1
CAUGHT_UP = -2
EMPTIED = -3


class Frame(NamedTuple):
    """One place in the source, innermost first where several make a stack."""

    filename: str
    line: int
    name: str


class Event(NamedTuple):
    """One line of a tape.

    A storage is allocated on a stream (nbytes > 0), FREED, or USED on another stream; or a stream
    has CAUGHT_UP with its queued work, or the cache is EMPTIED by hand (tensor is -1).
    """

    tensor: int
    nbytes: int
    stream: int = 0


Line = tuple[int, int, int]  # an event as a plain tuple, which is made in a third of the time
