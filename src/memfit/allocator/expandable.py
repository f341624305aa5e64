"""Expandable segments: one range of addresses a pool, mapped page by page as it fills.

From `c10/cuda/CUDACachingAllocator.cpp`, Note [Expandable Segments]: pages of 2 MiB (small pool)
or of `large_segment_size` (20 MiB) are mapped at the lowest address where the request fits.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

from memfit.allocator.segments import (
    SMALL_SEGMENT,
    Block,
    Pool,
    Span,
    insert_between,
    merge,
)
from memfit.allocator.settings import Settings


class Driver(Protocol):
    """Where pages and addresses come from: the allocator."""

    def grow(self, size: int) -> bool:
        """Take `size` bytes; return False where fewer are left."""

    def shrink(self, size: int) -> None:
        """Give this many bytes back."""

    def address_range(self, size: int, page: int) -> int:
        """A new range of addresses for whole pages."""

    def log(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """Called after each mapping and unmapping."""


class ExpandableSegments:
    """Mapping and unmapping for the pools of one allocator."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self._address_space = settings.device_memory + settings.device_memory // 8
        self._large_page = settings.large_segment_size
        self._driver = driver

    def best_fit(self, pool: Pool, i: int) -> int:
        """From the i-th cached block on, the one that can grow least: index into `pool.free`."""
        free = pool.free
        while i + 1 < len(free) and _can_be(free[i + 1][2]) < _can_be(free[i][2]):
            i += 1
        return i

    def new_block(self, pool: Pool, size: int) -> Block | None:
        """Map pages until a block of `size` bytes exists; None when the device is full."""
        block = self._lowest_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.next
            if unmapped is None or not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped
        pool.remove(block)
        return block

    def release(self, pool: Pool) -> None:
        """Unmap every page that lies wholly inside a cached block."""
        for _, _, block in list(pool.free):
            self._unmap(block)

    def _lowest_room(self, pool: Pool, size: int) -> Block:
        for _, unmapped in pool.unmapped:
            left = unmapped.previous
            start = left if left is not None and not left.allocated else unmapped
            if _room(start, size):
                return start
        page = SMALL_SEGMENT if pool.small else self._large_page
        space = -(-self._address_space // page) * page
        base = self._driver.address_range(space, page)
        block = Block(pool, space, base, Span(base, page))
        block.mapped = False
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first `size` bytes, rounded up to pages, and join them to their neighbours."""
        assert block.span is not None
        page = block.span.page
        size = -(-size // page) * page
        if not self._driver.grow(size):
            return False
        pool = block.pool
        self._driver.log("segment_map", block.address, size, pool.stream)
        pool.forget(block)
        block.mapped = True
        if size < block.size:
            rest = Block(pool, block.size - size, block.address + size, block.span)
            rest.mapped = False
            insert_between(rest, block, block.next)
            insort(pool.unmapped, (rest.address, rest))
            block.size = size
        merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        assert block.span is not None
        pool, (base, page) = block.pool, block.span
        start = base - (base - block.address) // page * page  # rounded up
        stop = base + (block.address + block.size - base) // page * page
        if start >= stop:
            return
        pool.remove(block)
        if block.address < start:
            before = Block(pool, start - block.address, block.address, block.span)
            insert_between(before, block.previous, block)
            pool.add(before)
        if block.address + block.size > stop:
            after = Block(pool, block.address + block.size - stop, stop, block.span)
            insert_between(after, block, block.next)
            pool.add(after)
        block.address, block.size, block.mapped = start, stop - start, False
        self._driver.shrink(block.size)
        self._driver.log("segment_unmap", start, block.size, pool.stream)
        merge(block)
        insort(pool.unmapped, (block.address, block))


def _can_be(block: Block) -> int:
    """The size to which a cached block can grow."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(block: Block | None, size: int) -> bool:
    room = 0
    while block is not None and room < size and not block.allocated:
        room += block.size
        block = block.next
    return room >= size
