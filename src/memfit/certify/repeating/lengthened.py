"""The tape of the whole model, made of that of a model some of whose blocks ran.

The tape is cut where a block makes its first storage in a forward or a backward. A piece that
repeats must have the events of the piece before it, each seen from where it stands: what is born,
and from which neighbour what is let go was born. It is then written down as often as the model has
such blocks, and every storage of it is one of its own. Where a cut, a comparison or the fate of a
repeated storage leaves a doubt, Unlike is raised and the model is traced in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from memfit.certify.repeating.alike import Layout, Unlike
from memfit.records.ledger import Phase
from memfit.train.measure.live import CUBLAS
from memfit.train.measure.storages import Block

ORDER = "the blocks do not run one after the other"


class Born(NamedTuple):
    """Where a storage was born: which pass over the blocks, which unit, and as what of it."""

    pass_: int
    unit: int
    number: int


class Piece(NamedTuple):
    """A stretch of the tape: one unit in one pass, or what is between passes (unit -1)."""

    pass_: int
    unit: int
    start: int
    stop: int


class Planted(NamedTuple):
    """A gradient of a block that was not traced."""

    storage: int
    like: int  # the storage of the traced block's gradient
    time: int  # the repetition that it belongs to


class Few(NamedTuple):
    """A recording under which only some blocks ran."""

    events: Sequence[int]  # a storage's number: it is born; the complement: it is let go
    blocks: Sequence[Block]  # the storages
    starts: Sequence[tuple[Phase, int]]  # where in the events each phase begins
    regions: Sequence[tuple[int, int]]  # of the events: where only some blocks ran
    in_backward: Sequence[bool]  # of each storage: whether a backward made it
    planted: Sequence[Planted]


class Whole(NamedTuple):
    """The whole model's recording."""

    events: list[int]
    blocks: list[Block]
    starts: list[tuple[Phase, int]]
    peaks: dict[Phase, tuple[int, int]]  # bytes, number of events before it


def lengthen(few: Few, layout: Layout) -> Whole:
    """The recording of the whole model. Raises Unlike where there is a doubt."""
    return _Lengthening(few, layout).make()


class _Lengthening:
    def __init__(self, few: Few, layout: Layout) -> None:
        self.few, self.layout = few, layout
        self.events, self.blocks = few.events, few.blocks
        self.unit_of = {b: unit for unit, own in enumerate(layout.units) for b in own}
        self.units: dict[str, int] = {}  # of paths; -1 outside
        self.born: dict[int, Born] = {}
        self.numbered: dict[tuple[int, int], list[int]] = {}  # storages by pass and unit
        self.descending: list[bool] = []  # of each pass
        self.planted = frozenset(p.storage for p in few.planted)
        self.pieces = list(self._cut())
        self._number()
        self._check()
        self.gradients = {(p.like, p.time): p.storage for p in few.planted}
        self.grown = frozenset(p.like for p in few.planted)
        self.new_events: list[int] = []
        self.new_blocks: list[Block] = []
        self.new: dict[tuple[int, int], int] = {}  # storage and repetition -> new storage
        self.dead: set[int] = set()
        self.waiting = deque(few.starts)
        self.starts: list[tuple[Phase, int]] = []

    def make(self) -> Whole:
        """The whole model's recording."""
        for piece in self.pieces:
            if more := self.layout.more.get(piece.unit, 0):
                self._repeat(piece, range(more + 1))
                continue
            at = piece.start
            while at < piece.stop:
                self._begin_phases(at)
                at = self._play_one(piece, at)
        self._begin_phases(len(self.events))
        self._check_fates()
        return Whole(self.new_events, self.new_blocks, self.starts, self._find_peaks())

    def _repeat(self, piece: Piece, times: Sequence[int]) -> None:
        self._begin_phases(piece.start)
        if self.waiting and self.waiting[0][1] < piece.stop:
            raise Unlike("a phase begins inside a block")
        for time in reversed(times) if self.descending[piece.pass_] else times:
            for at in range(piece.start, piece.stop):
                self._play(piece, time, at)

    def _begin_phases(self, at: int) -> None:
        """Phases that begin at or before a position begin where the new tape has come to."""
        while self.waiting and self.waiting[0][1] <= at:
            self.starts.append((self.waiting.popleft()[0], len(self.new_events)))

    # -- cutting -----------------------------------------------------------------------------

    def _unit(self, path: str) -> int:
        found = self.units.get(path)
        if found is None:
            block, _ = self.layout.split(path)
            if block is not None and block not in self.unit_of:
                raise Unlike("a block ran that was left out")
            found = self.units[path] = -1 if block is None else self.unit_of[block]
        return found

    def _cut(self) -> Iterator[Piece]:
        """All of the tape in pieces, in order."""
        last = 0
        for start, stop in self.few.regions:
            yield Piece(-1, -1, last, start)
            last = stop
            entries = self._entries(start, stop)
            yield Piece(-1, -1, start, entries[0][2] if entries else stop)
            edges = [*(at for _, _, at in entries[1:]), stop]
            before: tuple[bool, int] | None = None
            for (backward, unit, at), edge in zip(entries, edges, strict=True):
                if before is None or not self._follows(before, backward, unit):
                    self.descending.append(backward)
                before = backward, unit
                yield Piece(len(self.descending) - 1, unit, at, edge)
            self._check_complete(before)
        yield Piece(-1, -1, last, len(self.events))

    def _entries(self, start: int, stop: int) -> list[tuple[bool, int, int]]:
        """(in a backward, unit, position) of the first birth of each unit in a row."""
        found: list[tuple[bool, int, int]] = []
        for at in range(start, stop):
            event = self.events[at]
            if event < 0:
                continue
            unit = self._unit(self.blocks[event].module)
            if unit < 0:
                continue
            backward = self.few.in_backward[event]
            if not found or found[-1][:2] != (backward, unit):
                found.append((backward, unit, at))
        return found

    def _follows(self, before: tuple[bool, int], backward: bool, unit: int) -> bool:
        """Whether a piece continues the pass of the one before it; Unlike where units are skipped.

        A pass over the blocks is a forward from the first to the last, or a backward from the last
        one to the first whose backward there is.
        """
        count = len(self.layout.units)
        if before[0] == backward and unit == before[1] + (-1 if backward else 1):
            return True
        self._check_complete(before)
        if unit != (count - 1 if backward else 0):
            raise Unlike(ORDER)
        return False

    def _check_complete(self, before: tuple[bool, int] | None) -> None:
        """Raise Unlike where a forward ends before the last block."""
        if before is not None and not before[0] and before[1] != len(self.layout.units) - 1:
            raise Unlike(ORDER)

    def _number(self) -> None:
        for piece in self.pieces:
            if piece.unit < 0:
                continue
            own = self.numbered.setdefault((piece.pass_, piece.unit), [])
            for at in range(piece.start, piece.stop):
                event = self.events[at]
                if event >= 0 and self.blocks[event].op != CUBLAS:  # once a thread
                    self.born[event] = Born(piece.pass_, piece.unit, len(own))
                    own.append(event)

    # -- comparing ---------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise Unlike unless each repeated piece is as the one before it."""
        found = {(piece.pass_, piece.unit): piece for piece in self.pieces if piece.unit >= 0}
        for pass_ in range(len(self.descending)):
            for unit in self.layout.more:
                near = [found.get((pass_, unit + side)) for side in (-2, -1, 0, 1)]
                there = [piece for piece in near if piece is not None]
                if not there:
                    continue  # a backward that ends before
                if len(there) < len(near):
                    raise Unlike("a backward ends among blocks that are alike")
                if self._describe(there[1]) != self._describe(there[2]):
                    raise Unlike("blocks that are alike do not have the same events")

    def _describe(self, piece: Piece) -> list[Hashable]:
        return [
            self._describe_event(piece, self.events[at]) for at in range(piece.start, piece.stop)
        ]

    def _describe_event(self, piece: Piece, event: int) -> Hashable:
        if event >= 0:
            if event not in self.born:
                raise Unlike("cuBLAS's workspace comes with a block that repeats")
            return self._describe_block(piece.unit, self.blocks[event])
        born = self.born.get(~event)
        if born is None or abs(born.unit - piece.unit) > 1:
            raise Unlike("a block lets go what no neighbour of it has made")
        return born.pass_, born.unit - piece.unit, born.number

    def _describe_block(self, unit: int, block: Block) -> Hashable:
        number, rest = self.layout.split(block.module)
        place = None if number is None else number - self.layout.units[unit][0]
        return (
            block.nbytes, block.op, place, rest, block.source, tuple(block.shape), block.dtype,
            block.kind, block.vocab, block.outlived, block.stream,
        )  # fmt: skip

    # -- writing -----------------------------------------------------------------------------

    def _play_one(self, piece: Piece, at: int) -> int:
        """Write an event that is not repeated, or a row of releases that is; the next position."""
        event = self.events[at]
        born = None if event >= 0 else self.born.get(~event)
        if born is not None and born.unit in self.layout.more and ~event not in self.grown:
            stop, descending = self._find_row(at, born.unit)
            if stop > at:
                times = range(self.layout.more[born.unit] + 1)
                for time in reversed(times) if descending else times:
                    for position in range(at, stop):
                        self._release(self.new[~self.events[position], time])
                return stop
        self._play(piece, 0, at)
        return at + 1

    def _find_row(self, at: int, unit: int) -> tuple[int, bool]:
        """Where releases of a repeated unit end that stand between the same ones of its neighbours,
        and whether those of the unit after it come first; `at` where they do not stand so.

        What holds something of every block, as a cache does, lets it go in a row.
        """
        own = self._read_row(at, 1)
        count = len(own[1])
        stop = at + count
        before, after = self._read_row(at - 1, -1), self._read_row(stop, 1)
        if own[0] == unit and before[1][:count][::-1] == own[1] == after[1][:count]:
            for step in (1, -1):
                if (before[0], after[0]) == (unit - step, unit + step):
                    return stop, step < 0
        return at, False

    def _read_row(self, at: int, step: int) -> tuple[int, list[tuple[int, int]]]:
        """(unit, what of it) of the releases from here on that are of one unit."""
        unit, found = -1, list[tuple[int, int]]()
        while 0 <= at < len(self.events) and self.events[at] < 0:
            born = self.born.get(~self.events[at])
            if born is None or (found and born.unit != unit):
                break
            unit = born.unit
            found.append((born.pass_, born.number))
            at += step
        return unit, found

    def _play(self, piece: Piece, time: int, at: int) -> None:
        event = self.events[at]
        if event >= 0:
            if event not in self.planted:
                self._bear(piece, event, time)
            elif (event, 0) not in self.new:
                raise Unlike("a gradient that no backward has made")
            return
        self._release(self.new[self._find(piece, ~event, time)])

    def _bear(self, piece: Piece, storage: int, time: int) -> None:
        number = len(self.new_blocks)
        block = self.blocks[storage]
        if time:
            block = block.renamed(self.layout.rename(block.module, piece.unit, time))
            if (planted := self.gradients.get((storage, time))) is not None:
                self.new[planted, 0] = number
        self.new_blocks.append(block)
        self.new[storage, time] = number
        self.new_events.append(number)

    def _release(self, storage: int) -> None:
        if storage in self.dead:
            raise Unlike("a storage is let go twice")
        self.dead.add(storage)
        self.new_events.append(~storage)

    def _find(self, piece: Piece, storage: int, time: int) -> tuple[int, int]:
        """Which repetition of a storage a piece means, itself being the repetition `time`."""
        born = self.born.get(storage)
        if born is None or storage in self.grown:
            return storage, 0
        more = self.layout.more
        if piece.unit in more:
            away = born.unit - piece.unit
            if away == 0:
                return storage, time
            edge = 0 if away < 0 else more[piece.unit]
            if time == edge:
                return storage, 0
            like = self.numbered[born.pass_, piece.unit][born.number]
            return like, time + away
        if born.unit not in more:
            return storage, 0
        if piece.unit == born.unit + 1:
            return storage, more[born.unit]
        if piece.unit == born.unit - 1:
            return storage, 0
        raise Unlike("what is outside lets go what a repeated block has made")

    def _check_fates(self) -> None:
        """Raise Unlike unless repetitions of a storage share its fate, and gradients were born."""
        for planted in self.planted:
            if (planted, 0) not in self.new:
                raise Unlike("a gradient that no backward has made")
        for (storage, time), number in self.new.items():
            alike = (number in self.dead) == (self.new[storage, 0] in self.dead)
            if time and storage not in self.grown and not alike:
                raise Unlike("of a repeated storage one is let go and another is not")

    def _find_peaks(self) -> dict[Phase, tuple[int, int]]:
        """The highest moment of each phase, as the recorder notes them."""
        peaks: dict[Phase, tuple[int, int]] = {}
        live = 0
        edges = [*(position for _, position in self.starts[1:]), len(self.new_events)]
        for (phase, start), stop in zip(self.starts, edges, strict=True):
            best = peaks.get(phase)
            if best is None or live > best[0]:
                best = live, start
            for at in range(start, stop):
                event = self.new_events[at]
                if event < 0:
                    live -= self.new_blocks[~event].nbytes
                    continue
                live += self.new_blocks[event].nbytes
                if live > best[0]:
                    best = live, at + 1
            peaks[phase] = best
        return peaks
