"""Which tokens each step sees: a pure function of (seed, step), so that resuming needs one integer.

The rows of training form one endless sequence, epoch after epoch, each in its own seeded order;
step s takes rows [s * global_batch, (s + 1) * global_batch). An epoch ends where its rows end, be
that inside a step: the step's other rows are the next epoch's first ones, so no batch is short,
none is dropped, and every token appears exactly once an epoch.

- **packed pretraining** (`StreamRows`): documents in seeded order, one after the other, cut every
  `sequence_length` tokens. A cut document goes on in the next row as a document of its own, and
  the token at the cut still predicts the one behind it.
- **packed fine-tuning** (`TableRows`, `pack_best_fit`): whole examples, each in the row where it
  leaves the least room; the room left is padding.
- **pairs** (`PairRows`): two answers in neighbouring rows, the preferred one first, whole or cut.
- **unpacked** (`TableRows`, `one_a_row`): one piece of a document a row, padded on the right to the
  longest of its micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, overload

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Piece(NamedTuple):
    """Tokens [start, stop) of one document."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def seeded_order(count: int, seed: int, epoch: int, *purpose: int) -> Array:
    """A permutation of range(count); a pure function of its arguments.

    Sorts raw Philox words: numpy guarantees those streams, not `Generator.permutation`'s.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, epoch, *purpose])).random_raw(count)
    return np.argsort(words, kind="stable")


class Rows(ABC):
    """The endless sequence of rows."""

    packed: bool

    @property
    @abstractmethod
    def per_epoch(self) -> float:
        """Rows of one epoch; a fraction when an epoch ends inside a row."""

    @property
    def rows_once(self) -> int:
        """Rows that show everything once; the last one may end early."""
        return int(-(-self.per_epoch // 1))

    @property
    def ends_early(self) -> bool:
        """Whether a row of these is shorter than the others."""
        return bool(self.per_epoch % 1)

    @abstractmethod
    def row(self, index: int, *, once: bool = False) -> tuple[Piece, ...]:
        """The pieces of one row, left to right; with `once`, of the first epoch only."""

    @abstractmethod
    def costs(self, first: int, count: int, *, once: bool = False) -> Array:
        """(count, 3) of the rows from `first` on: tokens, documents, the longest one's tokens."""


class StreamRows(Rows):
    """Documents one after the other, cut every `width` tokens; epochs follow without a gap.

    The rows that lie whole inside an epoch are shown in an order of their own: neighbours are of
    one long document, and a batch of neighbours would teach one document at a time.
    """

    packed = True

    def __init__(self, lengths: Array, width: int, seed: int) -> None:
        self._lengths = np.asarray(lengths)
        self._width = width
        self._seed = seed
        self._total = int(self._lengths.sum())
        self._epoch = lru_cache(maxsize=2)(self._order)
        self._shuffle = lru_cache(maxsize=2)(self._row_order)

    @property
    def per_epoch(self) -> float:
        """Tokens of an epoch over tokens of a row."""
        return self._total / self._width

    def _order(self, epoch: int) -> tuple[Array, Array]:
        """Documents in the epoch's order, and where each begins (with the end as the last)."""
        order = seeded_order(len(self._lengths), self._seed, epoch)
        return order, np.concatenate([[0], np.cumsum(self._lengths[order])])

    def _row_order(self, epoch: int) -> Array:
        """Which row of the stream stands where, of those that lie whole in the epoch."""
        first, stop = self._whole(epoch)
        return first + seeded_order(stop - first, self._seed, epoch, 1)

    def _whole(self, epoch: int) -> tuple[int, int]:
        """The first row that begins in the epoch, and the first later one that ends after it."""
        begin, end = epoch * self._total, (epoch + 1) * self._total
        first = -(-begin // self._width)
        return first, max(first, end // self._width)

    def _places(self, first: int, count: int) -> Array:
        """The rows of the stream that are shown as rows `first` and on."""
        places = np.arange(first, first + count)
        last = (first + count - 1) * self._width // self._total
        for epoch in range(first * self._width // self._total, last + 1):
            low, stop = self._whole(epoch)
            inside = slice(max(low - first, 0), max(stop - first, 0))
            shown = places[inside]
            places[inside] = self._shuffle(epoch)[shown - low] if len(shown) else shown
        return places

    def row(self, index: int, *, once: bool = False) -> tuple[Piece, ...]:
        """The pieces of one row of the stream's `width` tokens."""
        index = index if once else int(self._places(index, 1)[0])
        position, end, pieces = index * self._width, (index + 1) * self._width, []
        end = min(end, self._total) if once else end
        while position < end:
            epoch, at = divmod(position, self._total)
            order, starts = self._epoch(epoch)
            document = int(np.searchsorted(starts, at, side="right")) - 1
            begin = at - int(starts[document])
            length = min(int(starts[document + 1]) - at, end - position)
            pieces.append(Piece(int(order[document]), begin, begin + length))
            position += length
        return tuple(pieces)

    def costs(self, first: int, count: int, *, once: bool = False) -> Array:
        """Of the rows as they are shown, or of the stream's first ones."""
        if once:
            return self._stream_costs(first, count)
        places = self._places(first, count)
        low = int(places.min())
        shown: Array = self._stream_costs(low, int(places.max()) + 1 - low)[places - low]
        return shown

    def _stream_costs(self, first: int, count: int) -> Array:
        """By epoch, for all rows at once: where documents begin, merged with where rows do."""
        width, total = self._width, self._total
        rows = np.zeros((count, 3), dtype="int64")
        rows[:, 0] = width
        begin, end = first * width, (first + count) * width
        for epoch in range(begin // total, -(-end // total)):
            low, high = max(epoch * total, begin), min((epoch + 1) * total, end)
            _, starts = self._epoch(epoch)
            inside = np.searchsorted(starts, [low - epoch * total, high - epoch * total])
            documents = starts[slice(*inside)] + epoch * total
            pieces = np.union1d(documents, np.arange(-(-low // width) * width, high, width))
            lengths = np.diff(np.append(pieces, high))
            np.add.at(rows[:, 1], pieces // width - first, 1)
            np.maximum.at(rows[:, 2], pieces // width - first, lengths)
        return rows


class RowTable(Sequence[tuple[Piece, ...]]):
    """Rows that are made once, as arrays: millions of them take tens of bytes each."""

    def __init__(self, documents: Array, starts: Array, stops: Array, begins: Array) -> None:
        """Pieces of all rows, one after the other, and where each row begins, with the end."""
        self.documents = documents
        self.starts = starts
        self.stops = stops
        self.begins = begins

    def __len__(self) -> int:
        return len(self.begins) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[Piece, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Piece, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Piece, ...] | Sequence[tuple[Piece, ...]]:
        """The pieces of one row, left to right."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        cut = slice(int(self.begins[index]), int(self.begins[index + 1]))
        columns = (self.documents[cut], self.starts[cut], self.stops[cut])
        return tuple(Piece(*values) for values in zip(*(c.tolist() for c in columns), strict=True))

    def costs(self, rows: Array) -> Array:
        """(rows, 3): tokens, documents, the longest one's tokens; padding not counted."""
        counts = np.diff(self.begins)
        at = _spread(self.begins[:-1], counts, rows)
        lengths = (self.stops[at] - self.starts[at]).astype("int64")
        edges = np.cumsum(counts[rows]) - counts[rows]
        found = np.empty((len(rows), 3), dtype="int64")
        found[:, 0] = np.add.reduceat(lengths, edges) if len(rows) else 0
        found[:, 1] = counts[rows]
        found[:, 2] = np.maximum.reduceat(lengths, edges) if len(rows) else 0
        return found


class TableRows(Rows):
    """Rows that are made once; each epoch shows all of them in another order."""

    def __init__(self, rows: RowTable, width: int, seed: int, *, packed: bool) -> None:
        self.packed = packed
        self.table = rows
        self._least: Array | None = None  # (rows,): tokens that a row has room for, at least
        self._width = width
        self._epoch = lru_cache(maxsize=2)(lambda e: seeded_order(len(rows), seed, e))

    @property
    def per_epoch(self) -> float:
        """Rows of the table."""
        return float(len(self.table))

    def row(self, index: int, *, once: bool = False) -> tuple[Piece, ...]:
        """The row that the epoch's order puts there."""
        epoch, at = divmod(index, len(self.table))
        if once and epoch:
            return ()
        return self.table[int(self._epoch(epoch)[at])]

    def costs(self, first: int, count: int, *, once: bool = False) -> Array:
        """Read off the table; a packed row is as wide as all, its padding one document more."""
        shown = _shown(self._epoch, len(self.table), first, count)
        found = self.table.costs(shown)
        if self._least is not None:
            found[:, ::2] = np.maximum(found[:, ::2], self._least[shown, None])
        if self.packed:
            padding = self._width - found[:, 0]
            found[:, 0] = self._width
            found[:, 1] += padding > 0
            found[:, 2] = np.maximum(found[:, 2], padding)
        return found


def _shown(epoch: Callable[[int], Array], size: int, first: int, count: int) -> Array:
    """What epochs of `size`, each in its own order, show from `first` on."""
    parts, at = [], first
    while at < first + count:
        number, begin = divmod(at, size)
        parts.append(epoch(number)[begin : begin + first + count - at])
        at += len(parts[-1])
    return np.concatenate([*parts, np.array([], dtype="int64")])


class PairRows(Rows):
    """Documents 2i and 2i + 1 in neighbouring rows; each epoch shows the pairs in another order."""

    packed = False

    def __init__(self, lengths: Array, seed: int) -> None:
        """lengths: of every document; a pair with one of 0 is left out."""
        self._lengths = np.asarray(lengths)
        self._pairs = np.flatnonzero(self._lengths.reshape(-1, 2).min(axis=1))
        self._epoch = lru_cache(maxsize=2)(lambda e: seeded_order(len(self._pairs), seed, e))

    @property
    def per_epoch(self) -> float:
        """Two a pair."""
        return 2.0 * len(self._pairs)

    def row(self, index: int, *, once: bool = False) -> tuple[Piece, ...]:
        """One answer with its prompt."""
        if once and index >= self.per_epoch:
            return ()
        epoch, at = divmod(index // 2, len(self._pairs))
        document = 2 * int(self._pairs[self._epoch(epoch)[at]]) + index % 2
        return (Piece(document, 0, int(self._lengths[document])),)

    def costs(self, first: int, count: int, *, once: bool = False) -> Array:
        """One document a row, for all epochs that are met."""
        pairs = range(first // 2, -(-(first + count) // 2))
        shown = self._pairs[_shown(self._epoch, len(self._pairs), pairs.start, len(pairs))]
        documents = np.stack((2 * shown, 2 * shown + 1), axis=1).ravel()
        lengths = self._lengths[documents[first % 2 :][:count]]
        return np.stack((lengths, np.ones_like(lengths), lengths), axis=1)


def pack_best_fit(lengths: Array, width: int, seed: int, *, cut: bool = True) -> RowTable:
    """Whole documents in rows of `width`, longest first, each where the least room is left.

    Documents of more than `width` tokens are cut to it, or go on in rows of their own; those of
    none are left out. Equal lengths come in seeded order.

    All pieces of one length are placed at once: a row with the least room takes as many as fit,
    because no other room is between theirs and what it has left.
    """
    pieces = one_a_row(lengths, width, cut=cut)
    sizes = pieces.stops - pieces.starts
    counts = np.bincount(pieces.documents, minlength=len(lengths))
    order = _spread(np.cumsum(counts) - counts, counts, seeded_order(len(lengths), seed, 0))
    room = width - sizes[order]  # numpy sorts 16 bits in linear time
    order = order[np.argsort(room.astype("uint16") if width < 2**16 else room, kind="stable")]
    sizes = sizes[order]
    row_of = np.empty(len(order), dtype=pieces.documents.dtype)
    rooms = _Rooms(width)
    edges = np.flatnonzero(np.diff(sizes)) + 1
    for first, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(sizes)], strict=True):
        at = first
        while at < stop:
            length = int(sizes[at])
            space, rows = rooms.take(length, stop - at)
            each = space // length
            count = min(stop - at, each * len(rows))
            row_of[at : at + count] = np.repeat(rows, each)[:count]
            full, rest = divmod(count, each)
            rooms.put(space - each * length, rows[:full])
            if rest:
                rooms.put(space - rest * length, rows[full:])
            at += count
    order = order[np.argsort(row_of, kind="stable")]
    begins = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rooms.rows))])
    return RowTable(pieces.documents[order], pieces.starts[order], pieces.stops[order], begins)


def _spread(begins: Array, counts: Array, rows: Array) -> Array:
    """The numbers begins[r], begins[r] + 1, …, counts[r] of them, of one row after the other."""
    wanted = counts[rows]
    ends = np.cumsum(wanted)
    shift = np.repeat(begins[rows] - (ends - wanted), wanted)
    return shift + np.arange(len(shift))


class _Rooms:
    """Open rows by the room that is left in them; of one room, the last one put in goes first."""

    def __init__(self, width: int) -> None:
        self.rows = 0
        self._width = width
        self._spaces: list[int] = []  # the distinct rooms, ascending
        self._rows: dict[int, list[Array]] = {}

    def take(self, length: int, count: int) -> tuple[int, Array]:
        """The least room for `length`, and the rows that have it: enough for `count` pieces, or as
        many as there are. Where nothing has room, new rows."""
        at = bisect_left(self._spaces, length)
        space = self._spaces[at] if at < len(self._spaces) else self._width
        wanted = -(-count // (space // length))
        if at == len(self._spaces):
            self.rows += wanted
            return space, np.arange(self.rows - wanted, self.rows)
        found, held = [], self._rows[space]
        while held and wanted:
            newest = held.pop()
            if len(newest) > wanted:
                held.append(newest[:-wanted])
                newest = newest[-wanted:]
            found.append(newest[::-1])
            wanted -= len(newest)
        if not held:
            del self._rows[space], self._spaces[at]
        return space, np.concatenate(found)

    def put(self, space: int, rows: Array) -> None:
        """Leave rows with that much room; those without any are closed."""
        if not space or not len(rows):
            return
        if space not in self._rows:
            insort(self._spaces, space)
        self._rows.setdefault(space, []).append(rows)


def one_a_row(lengths: Array, width: int, *, cut: bool) -> RowTable:
    """One piece a row. A longer document is cut to `width`, or goes on in rows of its own."""
    lengths = np.asarray(lengths)
    counts = np.minimum(lengths, 1) if cut else -(-lengths // width)
    small = max(len(lengths), int(lengths.max(initial=0))) < np.iinfo("int32").max
    dtype = "int32" if small else "int64"
    documents = np.repeat(np.arange(len(lengths), dtype=dtype), counts)
    first = np.repeat((np.cumsum(counts) - counts), counts)
    starts = ((np.arange(len(documents)) - first) * width).astype(dtype)
    stops = np.minimum(starts + width, lengths[documents]).astype(dtype)
    return RowTable(documents, starts, stops, np.arange(len(documents) + 1))
