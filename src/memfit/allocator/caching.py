"""Replay of PyTorch's native CUDA caching allocator: from live tensors to reserved memory.

Rules from `c10/cuda/CUDACachingAllocator.cpp` (torch 2.13; each has a hand-worked test):

- a request is rounded up to 512 B (or to 1/n of its power of two: `roundup_power2_divisions`);
- up to 1 MiB comes from the small pool, the rest from the large one; pools are per stream;
- the smallest free block that is large enough is taken, the lowest address first;
- a rest of >= 512 B (small pool) or > 1 MiB (large pool) is split off, else it counts as allocated;
- a miss takes a segment from the driver: 2 MiB, 20 MiB below 10 MiB, else rounded up to 2 MiB;
- a freed block merges with its free neighbours in the segment;
- a block that another stream used (`record_stream`) counts as freed at once, and nothing may take
  it before that stream has caught up with the free; each allocation looks for such blocks first;
- beyond the allowed fraction, or at the capacity, oversize blocks go back (`max_split_size`), then
  every stream is waited for and every wholly free segment goes back, then it is an error;
- garbage is collected only where a fraction is set, as in torch, and never of expandable pages,
  whose blocks never fill their range of addresses;
- `expandable_segments` grow one address range by pages instead (`allocator.expandable`); the
  fraction is checked once a miss, against the segment that native mode would take.

When a stream catches up is not the allocator's to know: the tape says it (`CAUGHT_UP`). Where it
never does, such a block comes back only when memory runs out, which is the most that it can cost.

Not simulated: CUDA graphs' private pools. Addresses, which break ties, are taken to increase, or to
come in another order (`allocator.orders`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from memfit.allocator.expandable import ExpandableSegments
from memfit.allocator.give_back import find_garbage, find_oversize
from memfit.allocator.orders import RISING, find_place
from memfit.allocator.segments import (
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    Clock,
    Pool,
    merge,
)
from memfit.allocator.settings import MIN_LARGE_ALLOCATION, UNLIMITED, Settings
from memfit.allocator.tape import CAUGHT_UP, FREED, USED, Line
from memfit.records import Record

APART = 1 << 48  # bytes between the addresses of segments whose order is not the rising one


class Failure(Record, frozen=True, kw_only=True):
    """The allocation that the device could not serve."""

    event: int  # its index in the tape
    tensor: int
    nbytes: int
    reserved: int
    allocated: int


class Peaks(Record, frozen=True, kw_only=True):
    """Highest values over one stretch of a tape, bytes."""

    requested: int  # what the tensors asked for
    allocated: int  # the blocks they got: `torch.cuda.max_memory_allocated`
    reserved: int  # taken from the driver: `torch.cuda.max_memory_reserved`
    reserved_at_peak: int  # when `allocated` was highest


class Replay(Record, frozen=True, kw_only=True):
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
    """The capacity is reached and no cached segment can be released."""


class CachingAllocator:
    """One device's allocator: `allocate` and `free` storages by id; the counters are public."""

    def __init__(self, settings: Settings, order: int = RISING) -> None:
        self.settings = settings
        self.order = order  # of the addresses of segments, see `allocator.orders`
        self.pools: dict[tuple[bool, int], Pool] = {}
        self.blocks: dict[int, Block] = {}  # live, by tensor
        self.requested = self.allocated = self.reserved = 0
        self.retries = self.segments = self.wide_segments = 0
        self.next_address = 0
        self._allowed = settings.allowed
        self._collects = settings.garbage_collection_threshold > 0
        self._clocks = {True: Clock(), False: Clock()}
        self._uses: dict[int, list[int]] = {}  # other streams of live storages
        self._waiting: dict[int, list[Block]] = {}  # freed blocks, by stream that is behind
        self._ready: list[Block] = []  # freed blocks, once for every stream that caught up
        self._expandable: ExpandableSegments | None = None
        if settings.expandable_segments:
            self._expandable = ExpandableSegments(settings, self)
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
        if table := self.settings.roundup_power2_divisions:
            divisions = table[min(max(nbytes.bit_length() - 21, 0), len(table) - 1)]
            if divisions > 1 and nbytes > MIN_BLOCK * divisions:
                power = 1 << (nbytes.bit_length() - 1)
                step = power // divisions  # >= 512, as nbytes > 512 * divisions
                return -(-nbytes // step) * step
        return (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK

    def allocate(self, tensor: int, nbytes: int, stream: int = 0) -> None:
        """Serve one storage; raises OutOfMemory. Zero bytes take no block."""
        if nbytes == 0:
            return
        if self._ready:
            self._return_ready()
        size = self.round_size(nbytes)
        small = size <= SMALL_SIZE
        pool = self.pools.get((small, stream))
        if pool is None:
            pool = self.pools[small, stream] = Pool(small, stream, self._clocks[small])
        pool.clock.searches += 1
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
        """Return a storage's block to its pool, or let it wait for the streams that used it."""
        block = self.blocks.pop(tensor, None)
        if block is None:
            return
        self.requested -= block.requested
        self.allocated -= block.size
        if self._uses and tensor in self._uses:
            for stream in self._uses.pop(tensor):
                block.waits += 1
                self._waiting.setdefault(stream, []).append(block)
        else:
            self.cache(block)

    @property
    def delayed(self) -> list[Block]:
        """Blocks that were freed and are not cached yet."""
        blocks = (*self._ready, *(b for blocks in self._waiting.values() for b in blocks))
        return list({id(block): block for block in blocks}.values())

    def cache(self, block: Block) -> None:
        """Put a block into its pool, merged with its free neighbours."""
        block.allocated = False
        merge(block)
        block.pool.add(block)

    def use(self, tensor: int, stream: int) -> None:
        """`record_stream`: the storage is also read or written by work on this stream."""
        block = self.blocks.get(tensor)
        if block is not None and stream != block.pool.stream:
            streams = self._uses.setdefault(tensor, [])
            if stream not in streams:
                streams.append(stream)

    def catch_up(self, stream: int) -> None:
        """Record that the stream has finished its queued work; the next allocation sees it."""
        self._ready += self._waiting.pop(stream, [])

    def _return_ready(self) -> None:
        for block in self._ready:
            block.waits -= 1
            if block.waits == 0:
                self.cache(block)
        self._ready.clear()

    def empty_cache(self) -> None:
        """Wait for every stream and give wholly free segments (or pages) back to the driver."""
        for stream in list(self._waiting):
            self.catch_up(stream)
        self._return_ready()
        for _, pool in sorted(self.pools.items(), key=lambda item: item[0]):
            if self._expandable is not None:
                self._expandable.release(pool)
                continue
            for _, _, block in list(pool.free):
                if not block.is_split:
                    self._release(block)

    def grow(self, size: int) -> bool:
        """Take bytes from the driver; False at the capacity."""
        capacity = self.settings.capacity
        if capacity is not None and self.reserved + size > capacity:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def shrink(self, size: int) -> None:
        """Give bytes back."""
        self.reserved -= size

    def address_range(self, size: int, page: int) -> int:
        """A new range of addresses for whole pages: above all earlier ones, or as `order` says."""
        address = -(-self.next_address // page) * page
        self.next_address = address + size
        self.segments += 1
        if self.order == RISING or size == SMALL_SEGMENT:
            return address
        self.wide_segments += 1
        return find_place(self.wide_segments, self.order) * APART

    def log(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """Record an allocation from the driver or a release to it; a snapshot overrides this."""

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
            if size >= limit and block.size >= size + self.settings.max_non_split_rounding:
                return None  # nor waste much of one
        del free[i]
        return block

    def _should_split(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small or self._expandable is not None:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE and size < self.settings.max_split_size

    def _split(self, block: Block, size: int) -> Block:
        """Cut the first `size` bytes off; the rest is cached."""
        head = Block(block.pool, size, block.address, block.span)
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
        if self._collects and self._allowed is not None:
            self._collect_garbage(self._allowed)
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
        if size <= SMALL_SIZE:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE_ALLOCATION:
            segment = self.settings.large_segment_size
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self._allowed is not None and self.reserved + segment > self._allowed:
            return None
        if self._expandable is not None:
            return self._expandable.new_block(pool, size)
        if not self.grow(segment):
            return None
        block = Block(pool, segment, self.address_range(segment, ROUND_LARGE))
        self.log("segment_alloc", block.address, segment, pool.stream)
        return block

    def _release(self, block: Block) -> None:
        """Give a cached segment back to the driver."""
        block.pool.remove(block)
        self.shrink(block.size)
        self.log("segment_free", block.address, block.size, block.pool.stream)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        limit = self.settings.max_split_size
        if limit == UNLIMITED or self._expandable is not None:
            return False
        blocks, enough = find_oversize(pool, size, limit)
        for block in blocks:
            self._release(block)
        return enough

    def _collect_garbage(self, allowed: int) -> None:
        threshold = int(self.settings.garbage_collection_threshold * allowed)
        pools = [pool for (small, _), pool in sorted(self.pools.items()) if not small]
        for block in find_garbage(pools, self.reserved - threshold):
            self._release(block)


def replay(
    tape: Sequence[Line], settings: Settings, marks: Sequence[int] = (), order: int = RISING
) -> Replay:
    """Run a tape; `marks` (ascending indices) cut it into len(marks) + 1 stretches with own peaks.

    A tape that does not fit stops at the failing allocation, which is in the result. order: of the
    addresses of segments, see `allocator.orders`.
    """
    allocator = CachingAllocator(settings, order)
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
    allocator: CachingAllocator, tape: Sequence[Line], start: int, stop: int
) -> Failure | None:
    allocate, free = allocator.allocate, allocator.free
    for index in range(start, stop):
        tensor, nbytes, stream = tape[index]
        if nbytes == FREED:
            free(tensor)
            continue
        if nbytes < 0:
            follow(allocator, tape[index])
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


def follow(allocator: CachingAllocator, event: Line) -> None:
    """Do what one event says; raises OutOfMemory."""
    tensor, nbytes, stream = event
    if nbytes > 0:
        allocator.allocate(tensor, nbytes, stream)
    elif nbytes == FREED:
        allocator.free(tensor)
    elif nbytes == USED:
        allocator.use(tensor, stream)
    elif nbytes == CAUGHT_UP:
        allocator.catch_up(stream)
    else:
        allocator.empty_cache()
