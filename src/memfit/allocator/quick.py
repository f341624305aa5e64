"""The allocator's replay where no segment is ever released: the planner's, in one loop.

Without a limit, an oversize threshold or expandable segments the rules of `allocator.caching` come
down to best fit, splitting and merging, and what is reserved only grows. A plan replays millions of
events, so that they are done here without a call for each; the tests hold this loop to `caching`
on random tapes and on those of plans, byte for byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.orders import RISING, SEGMENTS, find_place
from memfit.allocator.segments import MIN_BLOCK, ROUND_LARGE, SMALL_SEGMENT, SMALL_SIZE
from memfit.allocator.settings import MIN_LARGE_ALLOCATION, UNLIMITED, Settings

SMALLEST = SMALL_SEGMENT // MIN_BLOCK  # segments of the large pools are 10 MiB at least
Ask = tuple[int, int]  # bytes and stream of one storage; of none, 0 bytes


class Held(NamedTuple):
    """What a replay came to, bytes."""

    stretches: list[int]  # the highest sum of blocks in each stretch
    reserved: int
    small: int  # of these, in segments of the small pools


class _Block:
    """A piece of a segment; sizes and addresses are counted in blocks of the smallest size."""

    __slots__ = ("address", "key", "next", "previous", "size")

    address: int
    key: int  # its size above its address while it is cached, else 0
    next: _Block | None
    previous: _Block | None
    size: int


# The cached blocks of one size class and one stream, each under its key: the first of a size or
# more fits best. Tuples themselves, which Python takes apart faster than named ones.
_Pool = tuple[list[int], list[_Block]]
# What every storage of some bytes and stream asks for: the key of a block of that size at address
# 0, the size, the segment that is taken where nothing cached is large enough, the least rest that
# is split off, and the pool's two lists.
_Request = tuple[int, int, int, int, list[int], list[_Block]]


def is_quick(settings: Settings) -> bool:
    """Whether these settings leave nothing but best fit, splitting and merging."""
    return (
        settings.capacity is None
        and settings.allowed is None
        and settings.max_split_size == UNLIMITED
        and not settings.expandable_segments
    )


def reserve_large(
    codes: Sequence[int], asks: Sequence[Ask], settings: Settings, orders: Iterable[int]
) -> list[int]:
    """Bytes that the segments of the large pools come to, their addresses in each of these orders.

    Small storages, which share no segment with others, are left out: a third of the events or more.
    """
    large = [nbytes > SMALL_SIZE for nbytes, _ in asks]
    large += large[::-1]  # of ~n as of n
    only = [code for code in codes if large[code]]
    return [replay_quickly(only, asks, settings, (), order).reserved for order in orders]


def replay_quickly(  # noqa: C901 (a call for each event would take as long as all the rest)
    codes: Sequence[int],
    asks: Sequence[Ask],
    settings: Settings,
    marks: Sequence[int],
    order: int = RISING,
) -> Held:
    """What `caching.replay` reserves and allocates for the same events; only where `is_quick`.

    codes: `n` where storage n is born, `~n` where it dies; asks: what each storage takes. A storage
    of no bytes takes nothing, and of one that is not alive nothing is freed. marks, order: as of
    `replay`; of another order than the rising one only where no storage is small.
    """
    requests, pools, bits, span = _read(asks, settings)
    live: list[_Block | None] = [None] * len(asks)
    stretches: list[int] = []
    allocated = reserved = small = segments = 0
    for start, stop in pairwise((0, *marks, len(codes))):
        peak = allocated
        for code in codes[start:stop]:
            if code >= 0:
                request = requests[code]
                if request is None:
                    continue
                wanted, size, have, least, keys, blocks = request
                at = bisect_left(keys, wanted)
                if at < len(keys):
                    block = blocks.pop(at)
                    del keys[at]
                    have = block.size
                else:
                    block = _Block()
                    block.previous = block.next = None
                    segments += 1
                    block.address = find_place(segments, order) << span
                    block.size = have
                    reserved += have
                    if have == SMALLEST:
                        small += have
                block.key = 0
                live[code] = block
                if have - size >= least:
                    tail = _Block()
                    tail.previous = block
                    tail.next = after = block.next
                    if after is not None:
                        after.previous = tail
                    block.next = tail
                    block.size = size
                    tail.size = rest = have - size
                    tail.address = address = block.address + size
                    tail.key = key = rest << bits | address
                    at = bisect_left(keys, key)
                    keys.insert(at, key)
                    blocks.insert(at, tail)
                    allocated += size
                else:
                    allocated += have
                if allocated > peak:
                    peak = allocated
            elif (freed := live[~code]) is not None:
                live[~code] = None
                keys, blocks = pools[~code]  # type: ignore[misc]
                size = freed.size
                allocated -= size
                left, right = freed.previous, freed.next
                if left is not None and left.key:
                    at = bisect_left(keys, left.key)
                    del keys[at], blocks[at]
                    left.size = size = left.size + size
                    left.next = right
                    if right is not None:
                        right.previous = left
                    freed = left
                if right is not None and right.key:
                    at = bisect_left(keys, right.key)
                    del keys[at], blocks[at]
                    freed.size = size = size + right.size
                    freed.next = after = right.next
                    if after is not None:
                        after.previous = freed
                freed.key = key = size << bits | freed.address
                at = bisect_left(keys, key)
                keys.insert(at, key)
                blocks.insert(at, freed)
        stretches.append(peak * MIN_BLOCK)
    return Held(stretches, reserved * MIN_BLOCK, small * MIN_BLOCK)


def _read(
    asks: Sequence[Ask], settings: Settings
) -> tuple[list[_Request | None], list[_Pool | None], int, int]:
    """What each storage asks for, and of which pool; the bits of an address, and those within a
    segment."""
    sizes = {ask: _measure(ask[0], settings) for ask in set(asks) if ask[0]}
    span = max((segment for _, segment in sizes.values()), default=0).bit_length()
    bits = span + SEGMENTS.bit_length()
    pools: dict[tuple[bool, int], _Pool] = {}
    requests: dict[Ask, _Request] = {}
    owners: dict[Ask, _Pool] = {}
    for ask, (size, segment) in sizes.items():
        small = size * MIN_BLOCK <= SMALL_SIZE
        pool = owners[ask] = pools.setdefault((small, ask[1]), ([], []))
        least = 1 if small else SMALL_SIZE // MIN_BLOCK + 1
        requests[ask] = size << bits, size, segment, least, *pool
    return list(map(requests.get, asks)), list(map(owners.get, asks)), bits, span


def _measure(nbytes: int, settings: Settings) -> tuple[int, int]:
    """The block that a request needs, and the segment it would take, in the smallest blocks."""
    size = CachingAllocator(settings).round_size(nbytes)
    if size <= SMALL_SIZE:
        segment = SMALL_SEGMENT
    elif size < MIN_LARGE_ALLOCATION:
        segment = settings.large_segment_size
    else:
        segment = -(-size // ROUND_LARGE) * ROUND_LARGE
    return size // MIN_BLOCK, segment // MIN_BLOCK
