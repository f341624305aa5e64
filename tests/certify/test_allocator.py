"""The allocator's replay: hand-worked cases, invariants, and a textbook second implementation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.certify.allocator import CachingAllocator, Event, OutOfMemory, Settings, replay
from memfit.units import GIB, KIB, MIB

EXPANDABLE = Settings(expandable_segments=True)


def run(*requests: int | tuple[int, int], conf: Settings | None = None) -> CachingAllocator:
    """Allocate storages 0, 1, …; a negative number -n-1 frees storage n."""
    allocator = CachingAllocator(conf or Settings())
    tensor = 0
    for request in requests:
        nbytes, stream = request if isinstance(request, tuple) else (request, 0)
        if nbytes < 0:
            allocator.free(-nbytes - 1)
        else:
            allocator.allocate(tensor, nbytes, stream)
            tensor += 1
    return allocator


def free(n: int) -> int:
    return -n - 1


def test_one_byte_takes_a_block_of_512_in_a_segment_of_2_mib() -> None:
    a = run(1)
    assert (a.requested, a.allocated, a.reserved) == (1, 512, 2 * MIB)


def test_no_bytes_take_nothing() -> None:
    assert run(0).reserved == 0


def test_up_to_one_mib_is_small_and_above_is_large() -> None:
    assert run(MIB).reserved == 2 * MIB
    assert run(MIB + 1).reserved == 20 * MIB


def test_a_small_segment_serves_until_512_bytes_are_left() -> None:
    assert run(MIB, MIB).reserved == 2 * MIB
    assert run(MIB, MIB - 512, 512).reserved == 2 * MIB
    assert run(MIB, MIB, 1).reserved == 4 * MIB


def test_large_requests_below_10_mib_share_segments_of_20_mib() -> None:
    assert run(10 * MIB - 512).reserved == 20 * MIB
    assert run(9 * MIB, 9 * MIB).reserved == 20 * MIB
    assert run(10 * MIB).reserved == 10 * MIB
    assert run(11 * MIB + 1).reserved == 12 * MIB


def test_a_large_block_keeps_a_rest_of_one_mib_and_counts_it_as_allocated() -> None:
    kept = run(19 * MIB, free(0), 18 * MIB)  # 20 - 18 = 2 MiB is more than 1 MiB: split
    assert kept.allocated == 18 * MIB
    assert run(19 * MIB + 1).allocated == 20 * MIB  # 20 MiB - 19 MiB - 512 B stays inside
    assert run(20 * MIB, free(0), 19 * MIB).allocated == 20 * MIB  # exactly 1 MiB stays inside
    assert run(20 * MIB, free(0), 19 * MIB - 512).allocated == 19 * MIB - 512


def test_the_smallest_sufficient_block_is_taken() -> None:
    a = run(40 * MIB, 30 * MIB, free(0), free(1), 29 * MIB)
    a.allocate(9, 40 * MIB)  # the 40 MiB block is still whole
    assert a.reserved == 70 * MIB


def test_freed_neighbours_merge_and_serve_a_larger_request() -> None:
    a = run(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, free(1), free(0), free(2), free(3), 20 * MIB)
    assert a.reserved == 20 * MIB


def test_blocks_of_two_segments_never_merge() -> None:
    assert run(10 * MIB, 10 * MIB, free(0), free(1), 20 * MIB).reserved == 40 * MIB


def test_streams_do_not_share_cached_blocks() -> None:
    assert run((5 * MIB, 0), (free(0), 0), (5 * MIB, 7)).reserved == 40 * MIB


def test_at_the_capacity_wholly_free_segments_go_back() -> None:
    a = run(30 * MIB, free(0), 38 * MIB, conf=Settings(capacity=40 * MIB))
    assert (a.retries, a.reserved) == (1, 38 * MIB)
    with pytest.raises(OutOfMemory):
        a.allocate(9, 3 * MIB)


def test_a_split_segment_does_not_go_back() -> None:
    a = run(12 * MIB, free(0), 4 * MIB, conf=Settings(capacity=20 * MIB))
    with pytest.raises(OutOfMemory):
        a.allocate(9, 11 * MIB)
    assert a.reserved == 12 * MIB


def test_roundup_power2_divisions_rounds_to_a_fraction_of_the_power_of_two() -> None:
    conf = Settings(roundup_power2_divisions=4)
    assert run(1200 * KIB, conf=conf).allocated == 1280 * KIB
    assert run(1024 * KIB, conf=conf).allocated == 1024 * KIB
    assert run(2048, conf=conf).allocated == 2048  # not above 512 x 4: plain rounding
    assert run(2049, conf=conf).allocated == 2560


def test_max_split_size_neither_cuts_oversize_blocks_nor_wastes_them() -> None:
    conf = Settings(max_split_size=64 * MIB)
    assert run(100 * MIB, free(0), 10 * MIB, conf=conf).reserved == 110 * MIB
    assert run(100 * MIB, free(0), 81 * MIB, conf=conf).allocated == 100 * MIB
    assert run(100 * MIB, free(0), 80 * MIB, conf=conf).reserved == 180 * MIB
    full = Settings(max_split_size=64 * MIB, capacity=250 * MIB)
    a = run(100 * MIB, 90 * MIB, 8 * MIB, free(0), free(1), free(2), 150 * MIB, conf=full)
    assert a.reserved == 170 * MIB  # the two oversize blocks went back, the small segment stayed


def test_garbage_collection_gives_back_old_segments_before_the_capacity() -> None:
    conf = Settings(capacity=100 * MIB, garbage_collection_threshold=0.5)
    a = run(30 * MIB, 30 * MIB, free(0), free(1), 32 * MIB, conf=conf)
    assert a.reserved < 92 * MIB
    assert a.retries == 0


def test_expandable_segments_grow_by_pages_of_20_mib() -> None:
    a = run(19 * MIB + 1, conf=EXPANDABLE)
    assert (a.allocated, a.reserved) == (19 * MIB + 512, 20 * MIB)
    a.allocate(1, 30 * MIB)
    assert a.reserved == 60 * MIB
    assert run(1, conf=EXPANDABLE).reserved == 2 * MIB


def test_expandable_segments_reuse_the_tail_instead_of_a_new_segment() -> None:
    sizes = (30 * MIB, free(0), 31 * MIB, free(1), 45 * MIB)
    assert run(*sizes, conf=EXPANDABLE).reserved == 60 * MIB
    assert run(*sizes).reserved == (30 + 32 + 46) * MIB


def test_expandable_segments_spare_the_block_that_can_still_grow() -> None:
    # cached: 30 MiB that cannot grow, and the tail of 25 MiB that can
    sizes = (30 * MIB, 5 * MIB, 20 * MIB, free(2), free(0), 20 * MIB, 40 * MIB)
    assert run(*sizes, conf=EXPANDABLE).reserved == 80 * MIB


def test_expandable_segments_give_back_the_pages_inside_free_blocks() -> None:
    a = run(35 * MIB, 30 * MIB, free(0), conf=EXPANDABLE)
    a.empty_cache()
    assert a.reserved == 60 * MIB  # of the free 35 MiB one page of 20 is wholly free
    a.allocate(5, 20 * MIB)
    assert a.reserved == 80 * MIB


def test_a_tape_that_does_not_fit_names_the_allocation() -> None:
    tape = [Event(0, 30 * MIB), Event(1, 8 * MIB), Event(0, 0), Event(2, 60 * MIB)]
    result = replay(tape, Settings(capacity=64 * MIB))
    assert result.failure is not None
    assert (result.failure.event, result.failure.tensor) == (3, 2)
    assert replay(tape, Settings(capacity=90 * MIB)).failure is None


def test_stretches_have_their_own_peaks_and_the_whole_has_the_highest() -> None:
    tape = [Event(0, 4 * MIB), Event(1, 30 * MIB), Event(1, 0), Event(2, MIB)]
    result = replay(tape, Settings(), marks=(1, 3, 4))
    assert [p.allocated // MIB for p in result.stretches] == [4, 34, 5, 5]
    assert [p.reserved // MIB for p in result.stretches] == [20, 50, 52, 52]
    assert result.peaks.allocated == 34 * MIB
    assert result.fragmentation == 16 * MIB


sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 90 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB]),
)
requests = st.lists(
    st.tuples(
        st.one_of(
            st.integers(1, 4 * KIB),
            st.integers(1, 2 * MIB),
            st.integers(MIB, 90 * MIB),
            st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB]),
        ),
        st.integers(0, 1),
        st.integers(0, 5),  # how long it lives: 5 = to the end
    ),
    min_size=1,
    max_size=120,
)


def tape_of(drawn: list[tuple[int, int, int]]) -> list[Event]:
    """Allocations whose storages die after a drawn number of later allocations."""
    tape: list[Event] = []
    for i, (nbytes, stream, _) in enumerate(drawn):
        dying = (j for j in range(i) if drawn[j][2] < 5 and j + drawn[j][2] * 3 == i - 1)
        tape += [Event(j, 0, drawn[j][1]) for j in dying]
        tape.append(Event(i, nbytes, stream))
    return tape


def chains(allocator: CachingAllocator) -> list[list]:
    """Every segment as its blocks in order, found from live and cached blocks."""
    known = list(allocator.blocks.values())
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


@given(requests, st.booleans())
@settings(max_examples=150, deadline=None)
def test_blocks_tile_their_segments_and_the_counters_add_up(drawn: list, expandable: bool) -> None:
    allocator = CachingAllocator(Settings(expandable_segments=expandable, device_memory=GIB))
    for tensor, nbytes, stream in tape_of(drawn):
        if nbytes:
            allocator.allocate(tensor, nbytes, stream)
        else:
            allocator.free(tensor)
    for chain in chains(allocator):
        for left, right in pairwise(chain):
            assert left.address + left.size == right.address
            cached = not left.allocated and not right.allocated
            assert not (cached and left.mapped == right.mapped)
    blocks = [b for chain in chains(allocator) for b in chain]
    assert sum(b.size for b in blocks if b.mapped) == allocator.reserved
    assert sum(b.size for b in blocks if b.allocated) == allocator.allocated
    assert allocator.requested <= allocator.allocated <= allocator.reserved
    for tensor in list(allocator.blocks):
        allocator.free(tensor)
    assert (allocator.requested, allocator.allocated) == (0, 0)
    allocator.empty_cache()
    assert allocator.reserved == 0


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
@settings(max_examples=100, deadline=None)
def test_the_replay_equals_a_textbook_allocator(drawn: list) -> None:
    tape = tape_of(drawn)
    peaks = replay(tape, Settings()).peaks
    assert (peaks.allocated, peaks.reserved) == textbook(tape)


@given(requests, st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_replay_is_deterministic_and_capacity_only_matters_when_reached(
    drawn: list, expandable: bool
) -> None:
    tape = tape_of(drawn)
    free_run = replay(tape, Settings(expandable_segments=expandable))
    assert free_run == replay(tape, Settings(expandable_segments=expandable))
    enough = free_run.peaks.reserved
    assert replay(tape, Settings(expandable_segments=expandable, capacity=enough)) == free_run
