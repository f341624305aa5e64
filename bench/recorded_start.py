"""What the allocator held before a recording began, worked back from its entries and its end.

A segment was there if it is there at the end, or was released, and no entry allocated it. A block
was live if it is live at the end, or was released, and no entry allocated it. What lies between was
cached. A released block's own size is not written down: it is the rounded request, and in the large
pool also a rest of up to 1 MiB that torch did not cut off, where the next block begins so near: one
that is live, or one that is allocated there while the block is still live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from memfit.allocator.segments import SMALL_SEGMENT, SMALL_SIZE, Block, Pool, insert_between
from memfit.core.errors import InvalidRequest

Entry = Mapping[str, Any]


class Held(NamedTuple):
    """A live block at the start; `tensor` names its storage in the tape."""

    address: int
    size: int
    requested: int
    tensor: int


class Start(NamedTuple):
    """A segment at the start with its live blocks, by address."""

    address: int
    size: int
    stream: int
    small: bool
    held: tuple[Held, ...]


def find_start(
    entries: Sequence[Entry], segments: Sequence[Entry], round_size: Any
) -> tuple[Start, ...]:
    """Every segment that was there before the first entry.

    Raises InvalidRequest for expandable segments that were mapped before: where they begin is not
    written down.
    """
    mapped = sum(
        e["size"] if e["action"] == "segment_map" else -e["size"]
        for e in entries
        if e["action"] in ("segment_map", "segment_unmap")
    )
    if mapped != sum(s["total_size"] for s in segments if s.get("is_expandable")):
        raise InvalidRequest(
            "pages of expandable segments were mapped before the recording began",
            hint="record from before the first allocation, with max_entries large enough",
        )
    live = _find_live(entries, segments)
    found = []
    for address, (size, stream, small) in sorted(_find_segments(entries, segments).items()):
        inside = [(a, live[a]) for a in sorted(live) if address <= a < address + size]
        ends = [a for a, _ in inside[1:]] + [address + size]
        held = []
        for (a, (known, requested, until)), end in zip(inside, ends[: len(inside)], strict=True):
            block = known or round_size(requested)
            if not known and not small:
                block = _with_rest(a, block, end, entries[:until])
            held.append(Held(a, block, requested, len(entries) + a))
        found.append(Start(address, size, stream, small, tuple(held)))
    return tuple(found)


def _with_rest(address: int, block: int, end: int, entries: Sequence[Entry]) -> int:
    """The block's size with the rest that was left in it; entries: those while it was live."""
    stop = address + block
    near = {e["addr"] for e in entries if e["action"] == "alloc"} | {end}
    rests = [place - stop for place in near if stop < place <= min(end, stop + SMALL_SIZE)]
    return block + min(rests, default=0)


def _find_segments(
    entries: Sequence[Entry], segments: Sequence[Entry]
) -> dict[int, tuple[int, int, bool]]:
    """Size, stream and whether it is of the small pool, of each segment at the start."""
    taken: set[int] = set()
    found: dict[int, tuple[int, int, bool]] = {}
    for entry in entries:
        if entry["action"] == "segment_alloc":
            taken.add(entry["addr"])
        elif entry["action"] == "segment_free":
            if entry["addr"] not in taken:
                small = entry["size"] == SMALL_SEGMENT  # a large one has at least 10 MiB
                found[entry["addr"]] = (entry["size"], entry["stream"], small)
            taken.discard(entry["addr"])
    for s in segments:
        if s["address"] not in taken and not s.get("is_expandable"):
            found[s["address"]] = (s["total_size"], s["stream"], s["segment_type"] == "small")
    return found


def _find_live(
    entries: Sequence[Entry], segments: Sequence[Entry]
) -> dict[int, tuple[int | None, int, int]]:
    """Of each block live at the start: size (None: not written down), requested bytes, and the
    index of the entry that released it."""
    allocated: set[int] = set()
    found: dict[int, tuple[int | None, int, int]] = {}
    released: set[int] = set()
    for index, entry in enumerate(entries):
        if entry["action"] == "alloc":
            allocated.add(entry["addr"])
        elif entry["action"] == "free_requested":
            if entry["addr"] not in allocated | released:
                found[entry["addr"]] = (None, entry["size"], index)
            allocated.discard(entry["addr"])
            released.add(entry["addr"])
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in allocated | released:
                requested = block.get("requested_size", block["size"])
                found[address] = (block["size"], requested, len(entries))
            address += block["size"]
    return found


def make_blocks(pool: Pool, start: Start) -> dict[int, Block]:
    """The segment's chain of blocks; cached ones go into the pool, live ones are returned."""
    pieces: list[tuple[int, int, Held | None]] = []
    at = start.address
    for held in start.held:
        if held.address > at:
            pieces.append((at, held.address - at, None))
        pieces.append((held.address, held.size, held))
        at = held.address + held.size
    if (rest := start.address + start.size - at) > 0:
        pieces.append((at, rest, None))
    blocks = [Block(pool, size, address) for address, size, _ in pieces]
    for left, right in pairwise(blocks):
        insert_between(right, left, None)
    live = {}
    for block, (_, _, owner) in zip(blocks, pieces, strict=True):
        if owner is None:
            pool.add(block)
        else:
            block.allocated, block.requested = True, owner.requested
            live[owner.tensor] = block
    return live
