"""Which cached segments the CUDA caching allocator releases before it retries the driver."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from memfit.allocator.segments import Block, Pool


def find_garbage(pools: Iterable[Pool], wanted: int) -> list[Block]:
    """Whole large segments, those older than the mean age first, until `wanted` bytes are found.

    A round takes all that are older, also beyond what is wanted. Age: searches since last cached.
    """
    old = [b for pool in pools for _, _, b in pool.free if not b.is_split]
    found: list[Block] = []
    while old and wanted > 0:
        ages = [b.pool.clock.searches - b.born for b in old]
        mean = sum(ages) / len(ages)
        found += [b for b, age in zip(old, ages, strict=True) if age >= mean]
        wanted -= sum(b.size for b, age in zip(old, ages, strict=True) if age >= mean)
        old = [b for b, age in zip(old, ages, strict=True) if age < mean]
    return found


def find_oversize(pool: Pool, size: int, limit: int) -> tuple[list[Block], bool]:
    """One oversize block that is large enough, else the largest ones; and whether they suffice.

    limit: `max_split_size`; blocks of at least this are oversize and never split.
    """
    wanted = max(size, limit)
    i = bisect_left(pool.free, (wanted, -1))
    if i < len(pool.free):
        return [pool.free[i][2]], True
    found: list[Block] = []
    for nbytes, _, block in reversed(pool.free):
        if wanted <= 0 or nbytes < limit:
            break
        found.append(block)
        wanted -= nbytes
    return found, wanted <= 0
