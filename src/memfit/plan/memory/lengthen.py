"""The recording of a deep model, made of that of a shallow one.

Blocks that are alike do alike things. A run of equal cycles of blocks is simulated with `CYCLES` of
them; where the second, third and fourth have the same events, seen from where each stands, the
third is repeated as often as the model has more. The storages get numbers of their own, so that an
allocator sees the events of the deep model, one by one. Where cycles differ, or what is outside of
them lets go what a repeated one has made, the model is simulated at its full depth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import replace

from memfit.meta import Meter
from memfit.plan.simulate.blocks import record
from memfit.plan.simulate.setting import Batch, Mark, Recording, Run, Setting

CYCLES = 5  # simulated of a run: two at each end, so that the third's neighbours are like itself
MIDDLE = CYCLES // 2


class Place(NamedTuple):
    """Where a stretch of events stands: a cycle of a run of blocks, or what is between runs."""

    pass_: int
    stretch: int  # of a pass: the forward of a run, its backward, the loss, …
    run: int  # -1 between runs
    cycle: int  # of its run


START = Place(-1, -1, -1, 0)  # of what is born before the first pass


class Piece(NamedTuple):
    """Events of one place, and what they belong to."""

    place: Place
    start: int
    marks: list[Mark]
    born: slice  # its own storages, in a recording's columns
    places: list[Place]  # its own, and those whose storages die here
    # each event: which of `places`, and which of its storages is born (n) or dies (~n)
    events: list[tuple[int, int]]


class _Unlike(Exception):
    """The cycles of a run differ: nothing can be repeated."""


def record_deep(setting: Setting, batch: Batch) -> Recording:
    """Every event of a setting whose runs are as long as the model's, loops unrolled."""
    longest = max((run.count for run in setting.runs), default=0)
    if longest <= CYCLES or setting.stages is not None:
        return record(setting, batch, unrolled=True)
    runs = tuple(Run(cycle=r.cycle, count=min(r.count, CYCLES)) for r in setting.runs)
    short = _record_short(replace(setting, runs=runs), batch)
    try:
        return _Lengthening(short, setting.runs).made()
    except _Unlike:
        return record(setting, batch, unrolled=True)


@lru_cache(maxsize=8)  # a search asks for many splits into recomputed and other blocks
def _record_short(setting: Setting, batch: Batch) -> Recording:
    return record(setting, batch, unrolled=True)


class _Lengthening:
    """One recording, lengthened."""

    def __init__(self, short: Recording, runs: tuple[Run, ...]) -> None:
        self.short, self.counts = short, [run.count for run in runs]
        self.blocks = [  # run and cycle of each simulated block
            (number, cycle)
            for number, run in enumerate(runs)
            for cycle in range(min(run.count, CYCLES))
            for _ in run.cycle
        ]
        self.births: list[tuple[int, Place]] = []  # the first storage of each place
        self.pieces = list(self._cut())
        self._check_alike()
        self.meter = Meter(cuda=short.meter.cuda)
        self.new: dict[Place, int] = {}  # the first of the deep model's storages, by place

    def made(self) -> Recording:
        """The deep model's; raises _Unlike where there is no telling what a place lets go."""
        passes: list[list[Mark]] = []
        events = self.meter.events
        self._play(self._read(START, 0, self.short.passes[0][0].event, []), 0)
        product = 0
        for _, own in groupby(self.pieces, key=lambda piece: piece.place.pass_):
            marks: list[Mark] = []
            for piece, cycle in self._repeated(list(own)):
                start = len(events)
                stop = piece.start + len(piece.events)
                if not passes and piece.start <= self.short.product <= stop and not product:
                    product = start + self.short.product - piece.start
                marks += [m._replace(event=start + m.event - piece.start) for m in piece.marks]
                self._play(piece, cycle)
            passes.append(marks)
        deaths = [event for event in events if event < 0]
        if len(set(deaths)) < len(deaths):
            raise _Unlike
        return Recording(self.meter, passes, len(events), self._gradients(), product)

    def _cut(self) -> Iterator[Piece]:
        """The events of each pass by place."""
        stop = 0
        for number, marks in enumerate(self.short.passes):
            start = marks[0].event if number == 0 else stop
            last = number == len(self.short.passes) - 1
            stop = self.short.stop if last else marks[-1].event
            edges = [*(mark.event for mark in marks[1:]), stop]
            stretch, before = -1, (-2, 0)
            for at, (key, group) in enumerate(
                groupby(
                    zip(marks, edges, strict=True), key=lambda pair: self._place_of(pair[0].name)
                )
            ):
                own = list(group)
                if key[0] == -1 or key[0] != before[0]:
                    stretch += 1
                before = key
                yield self._read(
                    Place(number, stretch, *key), own[0][0].event if at else start, own[-1][1],
                    [mark for mark, _ in own],
                )  # fmt: skip

    def _place_of(self, name: str) -> tuple[int, int]:
        word, _, index = name.rstrip("'").partition(" ")
        return self.blocks[int(index)] if word == "block" else (-1, 0)

    def _read(self, place: Place, start: int, stop: int, marks: list[Mark]) -> Piece:
        """The events of a place, whose storages have numbers in a row: they count births."""
        own = self.short.meter.events[start:stop]
        births = [event for event in own if event >= 0]
        first = births[0] if births else 0
        if births and place != START:
            self.births.append((first, place))
        places, events = {place: 0}, list[tuple[int, int]]()
        for event in own:
            if event >= 0:
                events.append((0, event - first))
                continue
            theirs, number = self._find(~event)
            events.append((places.setdefault(theirs, len(places)), ~number))
        return Piece(place, start, marks, slice(first, first + len(births)), list(places), events)

    def _find(self, storage: int) -> tuple[Place, int]:
        """The place that a storage of the shallow model is of, and which one of it it is."""
        at = bisect_right(self.births, storage, key=itemgetter(0))
        first, place = self.births[at - 1] if at else (0, START)
        return place, storage - first

    def _check_alike(self) -> None:
        """Raise _Unlike unless the inner cycles of each long run have the same events."""
        seen: dict[tuple[int, int, int], dict[int, Piece]] = {}
        for piece in self.pieces:
            p = piece.place
            if p.run >= 0 and self.counts[p.run] > CYCLES:
                found = seen.setdefault((p.pass_, p.stretch, p.run), {})
                if p.cycle in found:
                    raise _Unlike
                found[p.cycle] = piece
        for cycles in seen.values():
            if set(cycles) != set(range(CYCLES)):
                raise _Unlike
            inner = [self._describe(cycles[MIDDLE + side]) for side in (-1, 0, 1)]
            if inner[0] != inner[1] or inner[1] != inner[2]:
                raise _Unlike

    def _describe(self, piece: Piece) -> tuple[object, ...]:
        """Its events, storages named by how far from here they were born."""
        meter, place = self.short.meter, piece.place
        away: list[Place] = []
        for theirs in piece.places:
            steps = theirs.cycle - place.cycle if theirs.run == place.run else theirs.cycle
            if theirs == START or (theirs.run == place.run and abs(steps) > 1):
                raise _Unlike  # a weight, or further than the inner cycles reach
            away.append(theirs._replace(cycle=steps))
        columns = meter.requested, meter.kinds, meter.streams, meter.counts
        return away, piece.events, *(column[piece.born] for column in columns)

    def _repeated(self, pieces: list[Piece]) -> Iterator[tuple[Piece, int]]:
        """Each piece of a pass and its cycle in the deep model; the middle ones as often as they
        stand there."""
        for key, group in groupby(pieces, key=lambda piece: piece.place[:3]):
            own, more = list(group), self._more(key[2])
            if not more:
                yield from ((piece, piece.place.cycle) for piece in own)
                continue
            ascending = own[0].place.cycle < own[-1].place.cycle
            for piece in own:
                cycle = piece.place.cycle
                if cycle != MIDDLE:
                    yield piece, cycle + (more if cycle > MIDDLE else 0)
                    continue
                deep = range(MIDDLE, MIDDLE + more + 1)
                yield from ((piece, at) for at in (deep if ascending else reversed(deep)))

    def _more(self, run: int) -> int:
        """Cycles that the deep model has more of this run."""
        return max(0, self.counts[run] - CYCLES) if run >= 0 else 0

    def _deep(self, place: Place, cycle: int, theirs: Place) -> int:
        """The first of the deep model's storages of a place that this cycle of another names."""
        if theirs.run == place.run:
            at = cycle + theirs.cycle - place.cycle
        elif theirs.cycle == MIDDLE and self._more(theirs.run):
            raise _Unlike  # which of them is not said
        else:
            at = theirs.cycle + (self._more(theirs.run) if theirs.cycle > MIDDLE else 0)
        return self.new[theirs._replace(cycle=at)]

    def _play(self, piece: Piece, cycle: int) -> None:
        short, meter, place = self.short.meter, self.meter, piece.place
        self.new[place._replace(cycle=cycle)] = len(meter.requested)
        first = [self._deep(place, cycle, theirs) for theirs in piece.places]
        meter.events += [first[at] + n if n >= 0 else n - first[at] for at, n in piece.events]
        meter.requested += short.requested[piece.born]
        meter.kinds += short.kinds[piece.born]
        meter.owners += short.owners[piece.born]
        meter.streams += short.streams[piece.born]
        meter.counts += short.counts[piece.born]

    def _gradients(self) -> list[int]:
        """Those that are left, in the order of the model's parameters."""
        found: list[int] = []
        births = map(self._find, self.short.gradients)
        for (run, middle), group in groupby(births, key=lambda born: self._is_middle(born[0])):
            own = list(group)
            for at in range(self._more(run) + 1) if middle else (0,):
                for place, number in own:
                    cycle = place.cycle + (self._more(place.run) if place.cycle > MIDDLE else 0)
                    deep = place._replace(cycle=MIDDLE + at if middle else cycle)
                    found.append(self.new[deep] + number)
        return found

    def _is_middle(self, place: Place) -> tuple[int, bool]:
        """The run of a place, and whether it is a cycle that is repeated."""
        return place.run, place.cycle == MIDDLE and self._more(place.run) > 0
