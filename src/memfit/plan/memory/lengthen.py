"""The recording of a deep model, made of that of a shallow one.

Blocks that are alike do alike things. A run of equal cycles of blocks is simulated with `CYCLES` of
them; where the second, third and fourth have the same events, seen from where each stands, the
third is repeated as often as the model has more. The storages get numbers of their own, so that an
allocator sees the events of the deep model, one by one. Where cycles differ, or what is outside of
them lets go what a repeated one has made, the model is simulated at its full depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
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


class Piece(NamedTuple):
    """Events of one place."""

    place: Place
    start: int
    stop: int
    marks: list[Mark]


class Born(NamedTuple):
    """Which storage of a place."""

    place: Place
    number: int


class _Unlike(Exception):
    """The cycles of a run differ: nothing can be repeated."""


def record_deep(setting: Setting, batch: Batch) -> Recording:
    """Every event of a setting whose runs are as long as the model's, loops unrolled."""
    longest = max((run.count for run in setting.runs), default=0)
    if longest <= CYCLES or setting.stages is not None:
        return record(setting, batch, unrolled=True)
    runs = tuple(Run(cycle=r.cycle, count=min(r.count, CYCLES)) for r in setting.runs)
    short = record(replace(setting, runs=runs), batch, unrolled=True)
    try:
        return _Lengthening(short, setting.runs).made()
    except _Unlike:
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
        self.pieces = list(self._cut())
        self.birth: dict[int, Born] = {}
        for piece in self.pieces:
            self._number(piece)
        self._check_alike()
        self.meter = Meter(cuda=short.meter.cuda)
        self.new: dict[Place, list[int]] = {}  # the deep model's storages, by place
        self.outside: dict[int, int] = {}  # those of storages that are born before the first pass
        self.gone: set[int] = set()

    def made(self) -> Recording:
        """The deep model's; raises _Unlike where there is no telling what a place lets go."""
        passes: list[list[Mark]] = []
        events = self.meter.events
        first = self.short.passes[0][0].event
        self._play_outside(0, first)
        product = 0
        for _, own in groupby(self.pieces, key=lambda piece: piece.place.pass_):
            marks: list[Mark] = []
            for piece, cycle in self._repeated(list(own)):
                start = len(events)
                if not passes and piece.start <= self.short.product <= piece.stop and not product:
                    product = start + self.short.product - piece.start
                marks += [m._replace(event=start + m.event - piece.start) for m in piece.marks]
                self._play(piece, cycle)
            passes.append(marks)
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
                groupby(zip(marks, edges, strict=True), key=lambda pair: self._where(pair[0].name))
            ):
                own = list(group)
                if key[0] == -1 or key[0] != before[0]:
                    stretch += 1
                before = key
                yield Piece(
                    Place(number, stretch, *key), own[0][0].event if at else start, own[-1][1],
                    [mark for mark, _ in own],
                )  # fmt: skip

    def _where(self, name: str) -> tuple[int, int]:
        word, _, index = name.rstrip("'").partition(" ")
        return self.blocks[int(index)] if word == "block" else (-1, 0)

    def _number(self, piece: Piece) -> None:
        number = 0
        for event in self.short.meter.events[piece.start : piece.stop]:
            if event >= 0:
                self.birth[event] = Born(piece.place, number)
                number += 1

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

    def _describe(self, piece: Piece) -> list[tuple[object, ...]]:
        """Its events, storages told by how far from here they were born."""
        meter, place = self.short.meter, piece.place
        said: list[tuple[object, ...]] = []
        for event in meter.events[piece.start : piece.stop]:
            if event >= 0:
                said.append((meter.requested[event], meter.kinds[event], meter.streams[event],
                             meter.counts[event]))  # fmt: skip
                continue
            born = self.birth.get(~event)
            if born is None:
                raise _Unlike  # a weight, or what is there from the beginning
            theirs = born.place
            away = theirs.cycle - place.cycle if theirs.run == place.run else theirs.cycle
            if theirs.run == place.run and abs(away) > 1:
                raise _Unlike  # further than the inner cycles reach
            said.append((theirs.pass_, theirs.stretch, theirs.run, away, born.number))
        return said

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

    def _deep(self, place: Place, cycle: int, born: Born) -> list[int]:
        """The deep model's storages of the place that an event here names."""
        theirs = born.place
        if theirs.run == place.run:
            at = cycle + theirs.cycle - place.cycle
        elif theirs.cycle == MIDDLE and self._more(theirs.run):
            raise _Unlike  # which of them is not said
        else:
            at = theirs.cycle + (self._more(theirs.run) if theirs.cycle > MIDDLE else 0)
        return self.new[theirs._replace(cycle=at)]

    def _bear(self, storage: int) -> int:
        short, meter = self.short.meter, self.meter
        index = len(meter.requested)
        meter.requested.append(short.requested[storage])
        meter.kinds.append(short.kinds[storage])
        meter.owners.append(short.owners[storage])
        meter.streams.append(short.streams[storage])
        meter.counts.append(short.counts[storage])
        meter.events.append(index)
        return index

    def _play_outside(self, start: int, stop: int) -> None:
        for event in self.short.meter.events[start:stop]:
            if event >= 0:
                self.outside[event] = self._bear(event)
            else:
                self._free(self.outside[~event])

    def _play(self, piece: Piece, cycle: int) -> None:
        own = self.new[piece.place._replace(cycle=cycle)] = list[int]()
        for event in self.short.meter.events[piece.start : piece.stop]:
            if event >= 0:
                own.append(self._bear(event))
            elif (born := self.birth.get(~event)) is None:
                self._free(self.outside[~event])
            else:
                self._free(self._deep(piece.place, cycle, born)[born.number])

    def _free(self, index: int) -> None:
        if index in self.gone:
            raise _Unlike
        self.gone.add(index)
        self.meter.events.append(~index)

    def _gradients(self) -> list[int]:
        """Those that are left, in the order of the model's parameters."""
        found: list[int] = []
        births = [(self.birth.get(storage), storage) for storage in self.short.gradients]
        for (run, middle), group in groupby(births, key=lambda pair: self._is_middle(pair[0])):
            own = list(group)
            for at in range(self._more(run) + 1) if middle else (0,):
                for born, storage in own:
                    if born is None:
                        found.append(self.outside[storage])
                        continue
                    place = born.place
                    cycle = place.cycle + (self._more(place.run) if place.cycle > MIDDLE else 0)
                    deep = place._replace(cycle=MIDDLE + at if middle else cycle)
                    found.append(self.new[deep][born.number])
        return found

    def _is_middle(self, born: Born | None) -> tuple[int, bool]:
        """The run of a storage, and whether it is of a cycle that is repeated."""
        if born is None:
            return -1, False
        return born.place.run, born.place.cycle == MIDDLE and self._more(born.place.run) > 0
