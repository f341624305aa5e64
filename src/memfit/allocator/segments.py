"""Blocks and pools: the pieces of memory that the CUDA caching allocator hands out and keeps."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from memfit.core.units import MIB

MIN_BLOCK = 512
SMALL_SIZE = MIB  # largest block of the small pool
SMALL_SEGMENT = 2 * MIB
ROUND_LARGE = 2 * MIB


class Span(NamedTuple):
    """The addresses of an expandable segment, mapped in pages counted from its base."""

    base: int
    page: int


class Block:
    """A piece of a segment: allocated, cached, or (expandable only) not mapped.

    One that was freed and waits for other streams stays `allocated`: nothing may take it or merge
    with it.
    """

    __slots__ = (
        "address", "allocated", "born", "mapped", "next", "pool", "previous",
        "requested", "size", "span", "waits",
    )  # fmt: skip

    def __init__(self, pool: Pool, size: int, address: int, span: Span | None = None) -> None:
        self.pool = pool
        self.size = size
        self.address = address
        self.span = span  # None in a segment of cudaMalloc
        self.allocated = False
        self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.born = 0  # searches of the pool before it was last cached
        self.waits = 0  # streams that must still catch up before it can be cached

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with another block."""
        return self.previous is not None or self.next is not None


class Clock:
    """Counts the searches of the pools of one size class, of all streams: the age of blocks."""

    __slots__ = ("searches",)

    def __init__(self) -> None:
        self.searches = 0


class Pool:
    """The cached blocks of one size class and one stream, smallest first."""

    __slots__ = ("clock", "free", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int, clock: Clock) -> None:
        self.small = small
        self.stream = stream
        self.clock = clock
        self.free: list[tuple[int, int, Block]] = []  # (size, address, block)
        self.unmapped: list[tuple[int, Block]] = []  # (address, block), expandable only

    def add(self, block: Block) -> None:
        """Cache a block."""
        block.born = self.clock.searches
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a cached block out."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def forget(self, block: Block) -> None:
        """Take out a block that is not allocated, mapped or not."""
        if block.mapped:
            self.remove(block)
        else:
            self.unmapped.remove((block.address, block))


def merge(block: Block) -> None:
    """Swallow the neighbours that are free, and mapped or unmapped as the block is."""
    pool = block.pool
    left = block.previous
    if left is not None and not left.allocated and left.mapped is block.mapped:
        pool.forget(left)
        block.address = left.address
        block.size += left.size
        block.previous = left.previous
        if block.previous is not None:
            block.previous.next = block
    right = block.next
    if right is not None and not right.allocated and right.mapped is block.mapped:
        pool.forget(right)
        block.size += right.size
        block.next = right.next
        if block.next is not None:
            block.next.previous = block


def insert_between(block: Block, left: Block | None, right: Block | None) -> None:
    """Link a block into its segment's chain."""
    block.previous, block.next = left, right
    if left is not None:
        left.next = block
    if right is not None:
        right.previous = block
