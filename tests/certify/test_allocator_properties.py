"""The allocator's replay on random tapes: invariants, and second implementations of both modes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tapes import configurations, requests, tape_of

from memfit.allocator.caching import CachingAllocator, OutOfMemory, follow, replay
from memfit.allocator.settings import Settings
from memfit.allocator.tape import EMPTIED, FREED, Event
from memfit.core.units import MIB


def chains(allocator: CachingAllocator) -> list[list]:
    """Every segment as its blocks in order, found from live and cached blocks."""
    known = [*allocator.blocks.values(), *allocator.delayed]
    for pool in allocator.pools.values():
        known += [b for _, _, b in pool.free] + [b for _, b in pool.unmapped]
    heads = {id(b): b for b in known if b.previous is None}
    out = []
    for head in heads.values():
        chain = [head]
        while chain[-1].next is not None:
            chain.append(chain[-1].next)
        out.append(chain)
    assert sum(map(len, out)) == len(known)
    return out


def assert_sound(allocator: CachingAllocator) -> None:
    """Blocks tile their segments, none in two places, and the counters are their sums."""
    found = chains(allocator)
    for chain in found:
        for left, right in pairwise(chain):
            assert left.address + left.size == right.address
            cached = not left.allocated and not right.allocated
            assert not (cached and left.mapped == right.mapped)
    ranges = sorted((c[0].address, c[-1].address + c[-1].size) for c in found)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    blocks = [b for chain in found for b in chain]
    assert sum(b.size for b in blocks if b.mapped) == allocator.reserved
    live = list(allocator.blocks.values())
    assert sum(b.size for b in live) == allocator.allocated
    assert all(b.allocated and b.requested <= b.size for b in live)
    assert allocator.requested <= allocator.allocated <= allocator.reserved


def run_soundly(tape: list[Event], conf: Settings) -> CachingAllocator:
    """Follow a tape as far as it fits; no two live blocks overlap after any event."""
    allocator = CachingAllocator(conf)
    for event in tape:
        try:
            follow(allocator, event)
        except OutOfMemory:
            break
        live = sorted((b.address, b.address + b.size) for b in allocator.blocks.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(live))
        assert allocator.requested <= allocator.allocated <= allocator.reserved
    return allocator


@given(requests, configurations)
@settings(max_examples=150)
def test_blocks_tile_their_segments_and_the_counters_add_up(drawn: list, conf: Settings) -> None:
    allocator = run_soundly(tape_of(drawn), conf)
    assert_sound(allocator)
    for tensor in list(allocator.blocks):
        allocator.free(tensor)
    assert (allocator.requested, allocator.allocated) == (0, 0)
    allocator.empty_cache()
    assert allocator.reserved == 0


@given(requests, configurations)
@settings(max_examples=60)
def test_a_replay_is_deterministic_and_stays_within_the_capacity(
    drawn: list, conf: Settings
) -> None:
    tape = tape_of(drawn)
    once = replay(tape, conf)
    assert once == replay(tape, conf)
    assert conf.capacity is None or once.peaks.reserved <= conf.capacity
    if once.failure is not None:
        event = tape[once.failure.event]
        assert (event.tensor, event.nbytes) == (once.failure.tensor, once.failure.nbytes)


def textbook(tape: list[Event]) -> tuple[int, int]:
    """(peak allocated, peak reserved), by linear search over segments that are lists of pieces."""
    segments: list[dict] = []
    peak_allocated = peak_reserved = 0
    for tensor, nbytes, stream in tape:
        if nbytes == 0:
            for s in segments:
                s["pieces"] = [[n, None if t == tensor else t] for n, t in s["pieces"]]
                joined: list = []
                for n, t in s["pieces"]:
                    if joined and t is None and joined[-1][1] is None:
                        joined[-1][0] += n
                    else:
                        joined.append([n, t])
                s["pieces"] = joined
            continue
        need = max(512, (nbytes + 511) // 512 * 512)
        small = need <= MIB
        fits = [
            (piece[0], at, where, s)
            for at, s in enumerate(segments)
            if (s["small"], s["stream"]) == (small, stream)
            for where, piece in enumerate(s["pieces"])
            if piece[1] is None and piece[0] >= need
        ]
        if fits:
            size, _, where, segment = min(fits, key=lambda f: f[:3])
        else:
            size = 2 * MIB if small else 20 * MIB if need < 10 * MIB else (need + 2 * MIB - 1)
            size = size if need < 10 * MIB else size // (2 * MIB) * (2 * MIB)
            segment, where = {"small": small, "stream": stream, "pieces": [[size, None]]}, 0
            segments.append(segment)
        rest = size - need
        cut = rest >= 512 if small else rest > MIB
        pieces = [[need, tensor], [rest, None]] if cut else [[size, tensor]]
        segment["pieces"][where : where + 1] = pieces
        used = sum(n for s in segments for n, t in s["pieces"] if t is not None)
        peak_allocated = max(peak_allocated, used)
        peak_reserved = max(peak_reserved, sum(n for s in segments for n, _ in s["pieces"]))
    return peak_allocated, peak_reserved


@given(requests)
@settings(max_examples=100)
def test_the_replay_equals_a_textbook_allocator(drawn: list) -> None:
    tape = tape_of(drawn, streams=False)
    peaks = replay(tape, Settings()).peaks
    assert (peaks.allocated, peaks.reserved) == textbook(tape)


UNMAPPED = "unmapped"


def joined(pieces: list[list]) -> list[list]:
    """Neighbours that are both cached, or both not mapped, as one."""
    out: list[list] = []
    for size, owner in pieces:
        if out and owner in (None, UNMAPPED) and out[-1][1] == owner:
            out[-1][0] += size
        elif size:
            out.append([size, owner])
    return out


def map_room(pieces: list[list], need: int, page: int) -> list[list]:
    """The first stretch that is not live and long enough, mapped as far as it must be."""
    for i, (_, owner) in enumerate(pieces):
        if owner != UNMAPPED:
            continue
        first = i - 1 if i and pieces[i - 1][1] is None else i
        room = 0
        for last in range(first, len(pieces)):
            if pieces[last][1] not in (None, UNMAPPED):
                break
            size, owner = pieces[last]
            if room + size >= need:
                if owner == UNMAPPED:
                    mapped = min(-(-(need - room) // page) * page, size)
                    pieces[last : last + 1] = [[mapped, None], [size - mapped, UNMAPPED]]
                for between in range(first, last):
                    pieces[between][1] = None
                return joined(pieces)
            room += size
    raise AssertionError("a range of addresses without an end")


def textbook_pages(tape: list[Event]) -> tuple[int, int]:
    """(peak allocated, peak reserved) of expandable segments, by lists of pieces."""
    ranges: dict[tuple[bool, int], list[list]] = {}
    peak_allocated = peak_reserved = 0
    for tensor, nbytes, stream in tape:
        if nbytes == EMPTIED:
            for (small, _), pieces in ranges.items():
                page, at, out = (2 if small else 20) * MIB, 0, []
                for size, owner in pieces:
                    start, stop = -(-at // page) * page, (at + size) // page * page
                    if owner is None and start < stop:
                        out += [[start - at, None], [stop - start, UNMAPPED]]
                        out += [[at + size - stop, None]]
                    else:
                        out.append([size, owner])
                    at += size
                pieces[:] = joined(out)
            continue
        if nbytes == FREED:
            for pieces in ranges.values():
                pieces[:] = joined([[n, None if t == tensor else t] for n, t in pieces])
            continue
        need = max(512, (nbytes + 511) // 512 * 512)
        small = need <= MIB
        pieces = ranges.setdefault((small, stream), [[2**60, UNMAPPED]])

        def grown(i: int, pieces: list[list] = pieces) -> int:
            after = i + 1 < len(pieces) and pieces[i + 1][1] == UNMAPPED
            return pieces[i][0] + (pieces[i + 1][0] if after else 0)

        fits = sorted((n, i) for i, (n, t) in enumerate(pieces) if t is None and n >= need)
        if not fits:
            pieces[:] = map_room(pieces, need, (2 if small else 20) * MIB)
            chosen = next(i for i, (n, t) in enumerate(pieces) if t is None and n >= need)
        else:
            chosen = fits[0][1]
            for _, i in fits[1:]:
                if grown(i) >= grown(chosen):
                    break
                chosen = i
        size = pieces[chosen][0]
        pieces[chosen : chosen + 1] = [[need, tensor], [size - need, None]]
        pieces[:] = joined(pieces)
        every = [piece for found in ranges.values() for piece in found]
        live = sum(n for n, t in every if t not in (None, UNMAPPED))
        peak_allocated = max(peak_allocated, live)
        peak_reserved = max(peak_reserved, sum(n for n, t in every if t != UNMAPPED))
    return peak_allocated, peak_reserved


@given(requests)
@settings(max_examples=100)
def test_expandable_segments_equal_a_textbook_allocator(drawn: list) -> None:
    tape = []
    for event in tape_of(drawn, streams=False):
        tape.append(event)
        if event.nbytes > 0 and drawn[event.tensor][3] == 9:
            tape.append(Event(-1, EMPTIED))
    peaks = replay(tape, Settings(expandable_segments=True, device_memory=2**59)).peaks
    assert (peaks.allocated, peaks.reserved) == textbook_pages(tape)


@given(requests, st.booleans())
@settings(max_examples=30)
def test_a_capacity_matters_only_when_it_is_reached(drawn: list, expandable: bool) -> None:
    tape = tape_of(drawn)
    free_run = replay(tape, Settings(expandable_segments=expandable))
    enough = free_run.peaks.reserved
    assert replay(tape, Settings(expandable_segments=expandable, capacity=enough)) == free_run
    assert replay(tape, Settings(expandable_segments=expandable, capacity=2 * enough)) == free_run
