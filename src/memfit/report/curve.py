"""A step's memory over its events: what a timeline is drawn from, thinned without losing a peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from memfit.certify.evidence.recording import Recording
from memfit.core import units
from memfit.core.wording import PHASES
from memfit.records.ledger import Kind
from memfit.records.results import Tensor

STRETCHES = 700  # that a long tape is cut into; each gives its highest and its lowest event
AROUND = 150  # events before the peak, and after it, that are all kept: a view can zoom into them


class Point(NamedTuple):
    """The state after one event."""

    event: int
    phase: str
    total: int  # bytes of tensors alive
    kinds: list[int]  # bytes by kind, in the order of `Curve.kinds`
    reserved: int | None  # by the caching allocator; None on a CPU
    what: str  # what the event did
    source: str  # its line
    streams: list[int]  # bytes by the stream they were allocated on, in the order of `streams`


class Stream(NamedTuple):
    """One of the device's streams on which a step allocates; the allocator keeps pools of each."""

    number: int  # 0 is the default one, on which a step computes
    kinds: tuple[str, ...]  # of what is allocated there, the most bytes first


class Curve(NamedTuple):
    """Points in order, and what they are of."""

    events: int  # of the whole tape
    kinds: tuple[str, ...]
    points: list[Point]
    stretches: list[tuple[str, int, int]]  # phase, first event, event after the last
    peak: Point  # where the most is allocated
    streams: tuple[Stream, ...]


class State(NamedTuple):
    """What is alive after an event."""

    tensors: int
    by_kind: dict[str, int]
    by_stream: dict[int, int]
    allocated: int  # blocks of the caching allocator; the tensors themselves on a CPU
    reserved: int | None


def walk(recording: Recording) -> Iterator[State]:
    """The state after each event; its dicts are the same ones, that go on changing."""
    by_kind: dict[str, int] = {}
    by_stream: dict[int, int] = {}
    tensors = 0
    held = recording.held()
    sizes = {number: (t.kind, t.nbytes) for number, t in recording.tensors.items()}
    for index, event in enumerate(recording.events):
        if index >= len(held) and recording.settings is not None:
            return  # the device had no more to give
        if event.nbytes >= 0:
            kind, nbytes = sizes[event.tensor]
            change = nbytes if event.nbytes else -nbytes
            by_kind[kind] = by_kind.get(kind, 0) + change
            by_stream[event.stream] = by_stream.get(event.stream, 0) + change
            tensors += change
        allocated, reserved = held[index] if held else (tensors, None)
        yield State(tensors, by_kind, by_stream, allocated, reserved)


def draw_curve(recording: Recording) -> Curve:
    """The whole tape, or the highest and lowest event of each of many stretches of it.

    It includes every event around the peak, and the maximum of each stream and of reserved bytes.
    Kinds are stacked up to what is allocated: on a GPU `fragmentation` is what blocks are larger
    than the tensors in them.
    """
    kinds, streams = _kinds(recording), _streams(recording)
    allocated, *others = _values(recording, streams)
    if not allocated:
        raise ValueError("a tape without events has no curve")
    top = _highest(allocated)
    drawn = set(_keep(allocated)) | {_highest(values) for values in others}
    drawn |= set(range(max(0, top - AROUND), min(len(allocated), top + AROUND + 1)))
    marks = [0, *recording.marks, len(recording.events)]
    drawn |= {min(mark, len(allocated) - 1) for mark in marks}
    points = []
    phases = list(recording.phase_at())
    for index, state in enumerate(walk(recording)):
        if index not in drawn:
            continue
        sums = dict(state.by_kind)
        if state.reserved is not None:
            sums[Kind.FRAGMENTATION] = state.allocated - state.tensors
        what, source = _describe(recording, index)
        values = [sums.get(kind, 0) for kind in kinds]
        lanes = [state.by_stream.get(stream.number, 0) for stream in streams]
        points.append(
            Point(index, phases[index], state.tensors, values, state.reserved, what, source, lanes)
        )
    peak = next(p for p in points if p.event == top)
    pairs = zip(recording.stretches, pairwise(marks), strict=True)
    stretches = [(str(phase), start, stop) for phase, (start, stop) in pairs if stop > start]
    return Curve(len(recording.events), kinds, points, stretches, peak, streams)


def _values(recording: Recording, streams: Sequence[Stream]) -> list[list[int]]:
    """After each event: what is allocated, what is reserved, and what each stream holds."""
    found: list[list[int]] = [[] for _ in range(2 + len(streams))]
    for state in walk(recording):
        lanes = (state.by_stream.get(stream.number, 0) for stream in streams)
        for values, value in zip(
            found, (state.allocated, state.reserved or 0, *lanes), strict=True
        ):
            values.append(value)
    return found


def _highest(values: Sequence[int]) -> int:
    """The index of the first maximum."""
    return max(range(len(values)), key=values.__getitem__)


def _kinds(recording: Recording) -> tuple[str, ...]:
    """Those that occur, in the order of `Kind`."""
    found = {t.kind for t in recording.tensors.values()}
    if recording.settings is not None:
        found.add(Kind.FRAGMENTATION)
    return tuple(str(kind) for kind in Kind if kind in found)


def _streams(recording: Recording) -> tuple[Stream, ...]:
    """Those on which anything is allocated, by number; a CPU has none."""
    if recording.settings is None:
        return ()
    sums: dict[int, dict[str, int]] = {}
    for event in recording.events:
        if event.nbytes > 0:
            own = sums.setdefault(event.stream, {})
            kind = recording.tensors[event.tensor].kind
            own[kind] = own.get(kind, 0) + event.nbytes
    return tuple(
        Stream(number, tuple(sorted(own, key=lambda kind: -own[kind])))
        for number, own in sorted(sums.items())
    )


def _keep(values: list[int]) -> Iterator[int]:
    size = max(1, -(-len(values) // STRETCHES))
    for start in range(0, len(values), size):
        stretch = range(start, min(start + size, len(values)))
        yield max(stretch, key=values.__getitem__)
        yield min(stretch, key=values.__getitem__)
    yield len(values) - 1


def _describe(recording: Recording, index: int) -> tuple[str, str]:
    event = recording.events[index]
    tensor = recording.tensors.get(event.tensor)
    if tensor is None:
        return "the allocator is told of a stream or its cache", ""
    verb = {0: "releases", -1: "uses on another stream"}.get(event.nbytes, "allocates")
    place = f" in {tensor.module}" if tensor.module else ""
    what = f"{verb} {units.show_bytes(tensor.nbytes)} of {tensor.kind}, {name_of(tensor)}{place}"
    return what, tensor.source


def name_of(tensor: Tensor) -> str:
    """Operator, dtype and shape in a few words."""
    shape = f" {tensor.dtype} {list(tensor.shape)}" if tensor.dtype else ""
    return f"{tensor.op}{shape}"


def pack(curve: Curve) -> dict[str, Any]:
    """What a page needs to draw and to read the curve; texts once each.

    A point is (event, bytes of tensors, phase, what, where, bytes reserved, bytes by kind, bytes by
    stream), of which phase, what and where are indices of `strings`; `peak` is the index of a
    point.
    """
    strings: dict[str, int] = {}

    def number(words: str) -> int:
        return strings.setdefault(words, len(strings))

    def row(p: Point) -> list[Any]:
        phase = number(PHASES.get(p.phase, p.phase))
        what, source = number(p.what), number(p.source)
        return [p.event, p.total, phase, what, source, p.reserved, p.kinds, p.streams]

    rows = [row(p) for p in curve.points]
    peak = next((i for i, p in enumerate(curve.points) if p.event == curve.peak.event), 0)
    return {
        "events": curve.events,
        "kinds": curve.kinds,
        "peak": peak,
        "points": rows,
        "stretches": curve.stretches,
        "streams": curve.streams,
        "strings": list(strings),
    }
