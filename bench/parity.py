"""A snapshot that torch recorded on a GPU, read back as a tape, and our replay checked against it.

`torch.cuda.memory._record_memory_history(max_entries=..., context="alloc")`, work,
`torch.cuda.memory._snapshot()` (or `_dump_snapshot`, which pickles it): the entries say every
allocation and release with its address, and every segment. Without that `context`, torch 2.11 fails
in recomputed blocks. The replay gets only what a program decides (sizes, streams, order, and
where the driver put segments); what torch then did must come out entry by entry.

Which stream delayed a release is not recorded (`record_stream` leaves no entry), only that it was
delayed and until when: each such storage gets a stream of its own that catches up at that moment.
A cache emptied by hand looks like one emptied for want of memory: it is taken for the former where
the settings name neither a capacity nor a fraction. It does not distinguish delayed releases that
were due from ones that were waited for, where segments go back for garbage or `max_split_size`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from recorded_start import Entry, Start, find_start, make_blocks

from memfit.allocator.caching import CachingAllocator, OutOfMemory, follow
from memfit.allocator.segments import Clock, Pool
from memfit.allocator.settings import Settings, read_settings
from memfit.allocator.tape import CAUGHT_UP, EMPTIED, FREED, USED, Event
from memfit.certify.evidence.snapshot import RecordingAllocator, nowhere
from memfit.core.errors import InvalidRequest
from memfit.records import Record

TAKEN = ("segment_alloc", "segment_map")
RELEASED = ("segment_free", "segment_unmap")
FOLLOWED = ("alloc", "free_requested", "free_completed", "oom", *TAKEN, *RELEASED)
UNORDERED = ("free_completed", *RELEASED)  # torch takes several in the order of a hash table
NOT_MEMORY = ("snapshot", "user_defined", "workspace_snapshot")


class Recorded(NamedTuple):
    """What one device's program requested, and what torch did."""

    tape: tuple[Event, ...]
    settings: Settings
    entries: tuple[Entry, ...]  # those about memory
    segments: tuple[Mapping[str, Any], ...]  # at the end, by address
    start: tuple[Start, ...]  # segments that were there before the first entry


class Divergence(Record, frozen=True, kw_only=True):
    """The first place where the replay did something else than torch."""

    entry: int  # index among the entries about memory; their number when the end states differ
    recorded: str
    replayed: str
    frame: str  # the place in Python that asked; empty when it was not recorded


class Parity(Record, frozen=True, kw_only=True):
    """A replay beside its recording; `divergence` is None when they are equal."""

    entries: int
    events: int
    peak_allocated: int  # of the replay, bytes
    peak_reserved: int
    divergence: Divergence | None


def read_snapshot(
    snapshot: Mapping[str, Any], *, device: int = 0, settings: Settings | None = None
) -> Recorded:
    """The tape of one device's entries, with the settings that the snapshot names.

    settings: instead of the snapshot's own; a fraction or a capacity is not written there.
    Raises InvalidRequest: no history, actions that are not known, or a start that cannot be known.
    """
    traces = snapshot.get("device_traces") or []
    recorded = traces[device] if device < len(traces) else []
    entries = tuple(e for e in recorded if e["action"] not in NOT_MEMORY)
    unknown = sorted({e["action"] for e in entries} - set(FOLLOWED))
    if unknown:
        raise InvalidRequest(f"the snapshot has entries of an unknown kind: {', '.join(unknown)}")
    if not entries:
        raise InvalidRequest(
            f"the snapshot has no history of device {device}",
            hint="call torch.cuda.memory._record_memory_history() before anything is allocated",
        )
    if settings is None:
        text = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
        settings = read_settings(text)
    segments = sorted(
        (s for s in snapshot["segments"] if s.get("device", 0) == device),
        key=lambda s: s["address"],
    )
    start = find_start(entries, segments, CachingAllocator(settings).round_size)
    tape = tuple(_Reader(entries, settings, start).tape())
    return Recorded(tape, settings, entries, tuple(segments), start)


class _Reader:
    """Turns entries into the events that cause them."""

    def __init__(
        self, entries: Sequence[Entry], settings: Settings, start: Sequence[Start]
    ) -> None:
        self._entries = entries
        self._by_hand = settings.capacity is None and settings.allowed is None
        self._live = {h.address: h.tensor for segment in start for h in segment.held}
        self._delayed: dict[int, int] = {}

    def tape(self) -> Iterator[Event]:
        """One event or more for each entry that a program's call causes."""
        for index, entry in enumerate(self._entries):
            action = entry["action"]
            if action == "alloc":
                self._live[entry["addr"]] = index
                yield Event(index, entry["size"], entry["stream"])
            elif action == "oom":
                yield Event(index, entry["size"], entry["stream"])
            elif action == "free_requested":
                yield from self._free(index, entry["addr"])
            elif action == "free_completed":
                yield from self._complete(index, entry["addr"])
            elif action in RELEASED and self._by_hand and self._begins(index):
                yield Event(-1, EMPTIED)

    def _free(self, index: int, address: int) -> Iterator[Event]:
        tensor = self._live.pop(address, None)
        if tensor is None:
            raise InvalidRequest(
                f"entry {index} releases address {address:#x}, where nothing is live",
                hint="record again, from before the first allocation",
            )
        if not self._completes_at_once(index, address):
            self._delayed[address] = tensor
            yield Event(tensor, USED, _own_stream(tensor))
        yield Event(tensor, FREED)

    def _completes_at_once(self, index: int, address: int) -> bool:
        following = self._entries[index + 1 : index + 2]
        return any(e["action"] == "free_completed" and e["addr"] == address for e in following)

    def _complete(self, index: int, address: int) -> Iterator[Event]:
        """A delayed release: torch found its stream ready, or waited because memory ran out."""
        tensor = self._delayed.pop(address, None)
        if tensor is not None and not self._waited(index):
            yield Event(-1, CAUGHT_UP, _own_stream(tensor))

    def _waited(self, index: int) -> bool:
        for entry in self._entries[index:]:
            if entry["action"] in ("alloc", "oom", "free_requested"):
                return bool(entry["action"] == "oom")
            if entry["action"] in RELEASED:
                return True
        return False

    def _begins(self, index: int) -> bool:
        return not index or self._entries[index - 1]["action"] not in RELEASED


def _own_stream(tensor: int) -> int:
    return -1 - tensor


class _Follower(RecordingAllocator):
    """A replay whose segments lie where the driver put the recorded ones."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded.settings, nowhere)
        self._places = [e["addr"] for e in recorded.entries if e["action"] in TAKEN]
        self._taken = 0
        for segment in recorded.start:
            key = (segment.small, segment.stream)
            pool = self.pools.setdefault(key, Pool(*key, Clock()))
            live = make_blocks(pool, segment)
            self.blocks |= live
            self.tensors |= {id(block): tensor for tensor, block in live.items()}
            self.reserved += segment.size
            self.allocated += sum(block.size for block in live.values())
            self.requested += sum(block.requested for block in live.values())
        self.reset_peaks()

    def address_range(self, size: int, page: int) -> int:
        """Where the next recorded segment lies; beyond all where none is left."""
        made_up = super().address_range(size, page)
        return self._places[self._taken] if self._taken < len(self._places) else made_up

    def log(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """Write it down, and move on to the next recorded segment."""
        super().log(action, address, nbytes, stream)
        self._taken += action in TAKEN


def check_recording(recorded: Recorded) -> Parity:
    """Replay the tape and compare with what torch did: every entry, and the segments at the end."""
    allocator = _Follower(recorded)
    for event in recorded.tape:
        try:
            follow(allocator, event)
        except OutOfMemory:
            continue  # the program caught it and went on
    divergence = _compare_entries(recorded.entries, allocator.entries) or _compare_segments(
        recorded, tuple(allocator.describe_segments())
    )
    return Parity(
        entries=len(recorded.entries),
        events=len(recorded.tape),
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        divergence=divergence,
    )


def _compare_entries(recorded: Sequence[Entry], replayed: Sequence[Entry]) -> Divergence | None:
    pairs = zip_longest(_in_order(recorded), _in_order(replayed))
    for index, (theirs, ours) in enumerate(pairs):
        if theirs is None or ours is None or _key(theirs) != _key(ours):
            return Divergence(
                entry=index,
                recorded=_show_entry(theirs),
                replayed=_show_entry(ours),
                frame=_show_frame(theirs or {}),
            )
    return None


def _in_order(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Runs of what torch does in no certain order, by address."""
    for action, entries_of_run in groupby(entries, key=lambda e: e["action"]):
        run = list(entries_of_run)
        yield from sorted(run, key=lambda e: e["addr"]) if action in UNORDERED else run


def _key(entry: Entry) -> tuple[Any, ...]:
    return entry["action"], entry.get("addr"), entry["size"], entry["stream"]


def _compare_segments(
    recorded: Recorded, replayed: Sequence[Mapping[str, Any]]
) -> Divergence | None:
    for theirs, ours in zip_longest(recorded.segments, replayed):
        shown = [_show_segment(segment) for segment in (theirs, ours)]
        if shown[0] != shown[1]:
            return Divergence(
                entry=len(recorded.entries), recorded=shown[0], replayed=shown[1], frame=""
            )
    return None


def _show_entry(entry: Entry | None) -> str:
    if entry is None:
        return "nothing more"
    place = f" at {entry['addr']:#x}" if "addr" in entry else ""
    return f"{entry['action']} of {entry['size']} B{place} on stream {entry['stream']}"


def _show_frame(entry: Entry) -> str:
    """The innermost place in Python."""
    for frame in entry.get("frames", ()):
        if frame["filename"].endswith(".py"):
            return f"{frame['filename']}:{frame['line']} {frame['name']}"
    return ""


def _show_segment(segment: Mapping[str, Any] | None) -> str:
    if segment is None:
        return "no such segment"
    blocks = ", ".join(f"{b['size']} B {b['state']}" for b in segment["blocks"])
    kind, stream = segment["segment_type"], segment["stream"]
    return f"{kind} segment at {segment['address']:#x} on stream {stream}: {blocks}"
