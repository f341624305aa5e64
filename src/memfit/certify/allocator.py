"""Replay of PyTorch's native CUDA caching allocator: from live tensors to reserved memory.

Rules from `c10/cuda/CUDACachingAllocator.cpp` (constants checked against torch 2.13's
`c10/core/AllocatorConfig.h`):

- a request is rounded up to 512 B (or to 1/n of its power of two: `roundup_power2_divisions`);
- up to 1 MiB comes from the small pool, the rest from the large one; pools are per stream;
- the smallest free block that is large enough is taken, the lowest address first;
- the rest of a block is split off when it is >= 512 B (small pool) or > 1 MiB (large pool),
  otherwise it stays inside the block and counts as allocated;
- a miss takes a segment from the driver: 2 MiB, 20 MiB below 10 MiB, else rounded up to 2 MiB;
- a freed block merges with its free neighbours in the segment;
- at the capacity, cached segments that are wholly free go back to the driver, then it is an error;
- `expandable_segments` grow one address range by pages instead (`certify.expandable`).

Not simulated: blocks used on a second stream (`record_stream`), CUDA graphs' private pools.
Addresses of new segments are assumed to increase; they only break ties between equal sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from memfit.certify.expandable import ExpandableSegments
from memfit.certify.segments import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_ALLOCATION,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    Pool,
    merge,
)
from memfit.nouns import Noun
from memfit.units import GIB

UNLIMITED = 2**62


class Event(NamedTuple):
    """One line of a tape: a storage is allocated (nbytes > 0) or freed (nbytes = 0)."""

    tensor: int
    nbytes: int
    stream: int = 0


class Settings(Noun, frozen=True, kw_only=True):
    """What `PYTORCH_CUDA_ALLOC_CONF` can change, and the memory there is; torch's defaults."""

    capacity: int | None = None  # bytes the driver would hand out; None never refuses
    device_memory: int = 80 * GIB  # address space of an expandable segment: 1 1/8 of this
    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0  # of the capacity; 0 is off


class Failure(Noun, frozen=True, kw_only=True):
    """The allocation that the device could not serve."""

    event: int  # its index in the tape
    tensor: int
    nbytes: int
    reserved: int
    allocated: int


class Peaks(Noun, frozen=True, kw_only=True):
    """Highest values over one stretch of a tape, bytes."""

    requested: int  # what the tensors asked for
    allocated: int  # the blocks they got: `torch.cuda.max_memory_allocated`
    reserved: int  # taken from the driver: `torch.cuda.max_memory_reserved`
    reserved_at_peak: int  # when `allocated` was highest


class Replay(Noun, frozen=True, kw_only=True):
    """The whole tape's peaks, those of each stretch of it, and why it stopped if it did."""

    peaks: Peaks
    stretches: tuple[Peaks, ...]
    retries: int  # times cached segments were given back to make room
    segments: int  # segments taken from the driver
    failure: Failure | None

    @property
    def fragmentation(self) -> int:
        """Bytes reserved and not allocated at the moment of the allocated peak."""
        return self.peaks.reserved_at_peak - self.peaks.allocated


class OutOfMemory(Exception):
    """The capacity is reached and nothing more can be given back."""


class CachingAllocator:
    """One device's allocator: `allocate` and `free` storages by id; the counters are public."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pools: dict[tuple[bool, int], Pool] = {}
        self.blocks: dict[int, Block] = {}  # live, by tensor
        self.requested = self.allocated = self.reserved = 0
        self.retries = self.segments = 0
        self.next_address = 0
        self._expandable: ExpandableSegments | None = None
        if settings.expandable_segments:
            self._expandable = ExpandableSegments(
                settings.device_memory + settings.device_memory // 8, self
            )
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Start a new stretch: the peaks are the present values."""
        self.peak_requested = self.requested
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved_at_peak = self.reserved

    @property
    def peaks(self) -> Peaks:
        """Highest values since `reset_peaks`."""
        return Peaks(
            requested=self.peak_requested,
            allocated=self.peak_allocated,
            reserved=self.peak_reserved,
            reserved_at_peak=self.reserved_at_peak,
        )

    def round_size(self, nbytes: int) -> int:
        """Bytes of the block that a request needs."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            power = 1 << (nbytes.bit_length() - 1)
            step = power >> (divisions.bit_length() - 1)  # >= 512, as nbytes > 512 * divisions
            return nbytes if nbytes == power else -(-nbytes // step) * step
        return (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK

    def allocate(self, tensor: int, nbytes: int, stream: int = 0) -> None:
        """Serve one storage; raises OutOfMemory. Zero bytes take no block."""
        if nbytes == 0:
            return
        size = self.round_size(nbytes)
        small = size <= SMALL_SIZE
        pool = self.pools.get((small, stream))
        if pool is None:
            pool = self.pools[small, stream] = Pool(small)
        pool.searches += 1
        block = self._find(pool, size) or self._take(pool, size)
        rest = block.size - size
        if rest and self._should_split(pool, size, rest):
            block = self._split(block, size)
        block.allocated = True
        block.requested = nbytes
        self.blocks[tensor] = block
        self.requested += nbytes
        self.allocated += block.size
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
            self.reserved_at_peak = self.reserved

    def free(self, tensor: int) -> None:
        """Return a storage's block to its pool, merged with its free neighbours."""
        block = self.blocks.pop(tensor, None)
        if block is None:
            return
        block.allocated = False
        self.requested -= block.requested
        self.allocated -= block.size
        merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give every wholly free segment (or page, when expandable) back to the driver."""
        for pool in self.pools.values():
            if self._expandable is not None:
                self._expandable.release(pool)
                continue
            whole = [entry for entry in pool.free if not entry[2].is_split]
            pool.free = [entry for entry in pool.free if entry[2].is_split]
            self.reserved -= sum(size for size, _, _ in whole)

    def grow(self, size: int) -> bool:
        """Take bytes from the driver; False at the capacity."""
        capacity = self.settings.capacity
        if capacity is not None and self.reserved + size > capacity:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def address_range(self, size: int) -> int:
        """A new range of addresses, above all earlier ones and aligned to every page size."""
        address = self.next_address
        self.next_address += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        self.segments += 1
        return address

    def _find(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        i = bisect_left(free, (size, -1))
        if i == len(free):
            return None
        if self._expandable is not None:
            i = self._expandable.best_fit(pool, i)
        block = free[i][2]
        limit = self.settings.max_split_size
        if limit != UNLIMITED:
            if size < limit <= block.size:
                return None  # never cut an oversize block for a smaller request
            if size >= limit and block.size >= size + LARGE_SEGMENT:
                return None  # nor waste more than 20 MiB of one
        del free[i]
        return block

    def _should_split(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small or self._expandable is not None:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE and size < self.settings.max_split_size

    def _split(self, block: Block, size: int) -> Block:
        """Cut the first `size` bytes off; the rest is cached."""
        head = Block(block.pool, size, block.address, block.page)
        head.previous, head.next = block.previous, block
        if head.previous is not None:
            head.previous.next = head
        block.previous = head
        block.address += size
        block.size -= size
        block.pool.add(block)
        return head

    def _take(self, pool: Pool, size: int) -> Block:
        """A new block from the driver, after giving cached ones back if it must."""
        if self.settings.garbage_collection_threshold > 0:
            self._collect_garbage(pool)
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemory
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        if self._expandable is not None:
            return self._expandable.new_block(pool, size)
        if size <= SMALL_SIZE:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE_ALLOCATION:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        return Block(pool, segment, self.address_range(segment)) if self.grow(segment) else None

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back just enough oversize blocks; only with `max_split_size`."""
        limit = self.settings.max_split_size
        if limit == UNLIMITED or self._expandable is not None:
            return False
        wanted = max(size, limit)
        i = bisect_left(pool.free, (wanted, -1))
        if i < len(pool.free):
            self.reserved -= pool.free.pop(i)[0]
            return True
        released = 0
        while pool.free and released < wanted and pool.free[-1][0] >= limit:
            released += pool.free.pop()[0]
        self.reserved -= released
        return released >= wanted

    def _collect_garbage(self, asking: Pool) -> None:
        """Give back cached large segments older than the mean age, down to the threshold."""
        capacity = self.settings.capacity
        if capacity is None:
            return
        threshold = int(self.settings.garbage_collection_threshold * capacity)
        target = self.reserved - threshold
        pools = [pool for (small, _), pool in sorted(self.pools.items()) if not small]
        age = {id(b): p.searches - b.born for p in pools for _, _, b in p.free if not b.is_split}
        reclaimed, freed = 0, True
        while age and reclaimed < target and freed:
            mean, freed = sum(age.values()) / len(age), False
            for pool in pools:
                for _, _, block in list(pool.free):
                    if age.get(id(block), -1) >= mean:
                        del age[id(block)]
                        pool.remove(block)
                        reclaimed, freed = reclaimed + block.size, True
        self.reserved -= reclaimed


def replay(tape: Sequence[Event], settings: Settings, marks: Sequence[int] = ()) -> Replay:
    """Run a tape through the allocator; `marks` (ascending indices) cut it into
    len(marks) + 1 stretches, each with its own peaks.

    A tape that does not fit stops at the failing allocation, which is in the result.
    """
    allocator = CachingAllocator(settings)
    stretches: list[Peaks] = []
    failure = None
    for start, stop in pairwise((0, *marks, len(tape))):
        allocator.reset_peaks()
        failure = _run(allocator, tape, start, stop)
        stretches.append(allocator.peaks)
        if failure is not None:
            break
    top = max(stretches, key=lambda p: p.allocated)
    whole = Peaks(
        requested=max(p.requested for p in stretches),
        allocated=top.allocated,
        reserved=max(p.reserved for p in stretches),
        reserved_at_peak=top.reserved_at_peak,
    )
    return Replay(
        peaks=whole,
        stretches=tuple(stretches),
        retries=allocator.retries,
        segments=allocator.segments,
        failure=failure,
    )


def _run(
    allocator: CachingAllocator, tape: Sequence[Event], start: int, stop: int
) -> Failure | None:
    allocate, free = allocator.allocate, allocator.free
    for index in range(start, stop):
        tensor, nbytes, stream = tape[index]
        if nbytes == 0:
            free(tensor)
            continue
        try:
            allocate(tensor, nbytes, stream)
        except OutOfMemory:
            return Failure(
                event=index,
                tensor=tensor,
                nbytes=nbytes,
                reserved=allocator.reserved,
                allocated=allocator.allocated,
            )
    return None
