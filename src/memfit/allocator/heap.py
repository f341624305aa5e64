"""glibc's heap on a CPU: which freed tensors a process keeps, and what it then holds.

Under a recipe's `allocator: keep_freed:True` freed blocks below 32 MiB stay in the process, so that
the kernel need not clear the pages of every new tensor. The heap does not shrink: it is as large as
it ever was, with the gaps between blocks. Empty, freed blocks go back to the system at once.

Sizes and places are those of glibc 2.36 (malloc/malloc.c, `_int_malloc`, `_int_memalign`): the
smallest free chunk that is large enough is cut, and neighbours that are free are joined. Chunks of
C++ objects, which lie between tensors and keep their neighbours apart, are not known here: what
they cost was measured (`plan.memory.process.SCATTERED`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.core.units import MIB

KEY = "keep_freed"
KEEPING, RETURNING = f"{KEY}:True", f"{KEY}:False"
BELOW = 32 * MIB  # glibc refuses a larger M_MMAP_THRESHOLD (HEAP_MAX_SIZE / 2)
ALIGNED = 64  # bytes: what torch asks of each tensor's address (c10/core/alignment.h)
HEADER, STEP = 8, 16  # bytes of a chunk beside its content, and what chunks are multiples of
ENDS = 112  # bytes that aligning takes before it gives back what it does not need
PAGE = 4096


class Held(NamedTuple):
    """What a process holds for its tensors at the worst instant, bytes."""

    heap: int  # as large as it had been by then
    mapped: int  # larger tensors, each on its own
    largest: int  # of the blocks that went to the heap, of the whole run


def keeps_freed(text: str) -> bool:
    """Whether a CPU's `allocator` keeps freed blocks; raises InvalidRequest for what is none."""
    plain = "".join(text.split())
    if plain not in ("", KEEPING, RETURNING):
        raise InvalidRequest(
            f"`allocator` is `{text}`, and a CPU's is `{KEEPING}` or `{RETURNING}`",
            hint=f"`{KEEPING}` is faster, `{RETURNING}` holds less; left out, memfit decides",
        )
    return plain == KEEPING


def hold_freed(events: Iterable[Sequence[int]]) -> Held:
    """What a process that keeps freed blocks holds at most.

    events: storage and bytes of each birth, 0 of a death.
    """
    heap = _Heap()
    mapped, most, largest = 0, (0, 0), 0
    large: dict[int, int] = {}
    for storage, nbytes, *_ in events:
        if nbytes >= BELOW:
            large[storage] = -(-(nbytes + PAGE) // PAGE) * PAGE
            mapped += large[storage]
        elif nbytes > 0:
            heap.take(storage, nbytes)
            largest = max(largest, nbytes)
        elif storage in large:
            mapped -= large.pop(storage)
        else:
            heap.free(storage)
        if heap.high + mapped > sum(most):
            most = heap.high, mapped
    return Held(*most, largest)


class _Heap:
    """Addresses from 0 on; free chunks by size and by both of their ends."""

    def __init__(self) -> None:
        self.high = self.top = 0
        self._held: dict[int, tuple[int, int]] = {}  # of a storage: its chunk's begin and size
        self._free: list[tuple[int, int]] = []  # size and begin, sorted
        self._sizes: dict[int, int] = {}  # by begin
        self._begins: dict[int, int] = {}  # by end

    def take(self, storage: int, nbytes: int) -> None:
        size = -(-(nbytes + HEADER) // STEP) * STEP
        size += -size % ALIGNED
        place = bisect_left(self._free, (size + ENDS, 0))
        if place == len(self._free):
            begin, self.top = self.top, self.top + size
            self.high = max(self.high, self.top)
        else:
            whole, begin = self._free[place]
            self._remove(begin, whole)
            self._insert(begin + size, whole - size)
        self._held[storage] = begin, size

    def free(self, storage: int) -> None:
        begin, size = self._held.pop(storage)
        before, after = self._begins.get(begin), self._sizes.get(begin + size)
        if after is not None:
            self._remove(begin + size, after)
            size += after
        if before is not None:
            self._remove(before, begin - before)
            begin, size = before, size + begin - before
        if begin + size == self.top:
            self.top = begin
        else:
            self._insert(begin, size)

    def _insert(self, begin: int, size: int) -> None:
        self._sizes[begin], self._begins[begin + size] = size, begin
        insort(self._free, (size, begin))

    def _remove(self, begin: int, size: int) -> None:
        del self._sizes[begin], self._begins[begin + size]
        self._free.pop(bisect_left(self._free, (size, begin)))
