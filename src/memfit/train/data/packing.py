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
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

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


class TableRows(Rows):
    """Rows that are made once; each epoch shows all of them in another order."""

    def __init__(
        self, rows: Sequence[tuple[Piece, ...]], width: int, seed: int, *, packed: bool
    ) -> None:
        self.packed = packed
        self.table = rows
        self._width = width
        self._epoch = lru_cache(maxsize=2)(lambda e: seeded_order(len(rows), seed, e))
        self._costs = np.array([self._cost(row) for row in rows], dtype="int64")

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
        size = len(self._costs)
        epochs = range(first // size, -(-(first + count) // size))
        shown = np.concatenate([self._costs[self._epoch(e)] for e in epochs])
        return shown[first - epochs[0] * size :][:count]

    def _cost(self, row: tuple[Piece, ...]) -> tuple[int, int, int]:
        lengths = [p.length for p in row]
        if self.packed:
            lengths += [self._width - sum(lengths)] if sum(lengths) < self._width else []
        return sum(lengths), len(lengths), max(lengths, default=0)


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
        size = int(self.per_epoch)
        epochs = range(first // size, -(-(first + count) // size))
        pairs = np.concatenate([self._pairs[self._epoch(e)] for e in epochs])
        documents = np.stack((2 * pairs, 2 * pairs + 1), axis=1).ravel()
        lengths = self._lengths[documents[first - epochs[0] * size :][:count]]
        return np.stack((lengths, np.ones_like(lengths), lengths), axis=1)


def pack_best_fit(
    lengths: Array, width: int, seed: int, *, cut: bool = True
) -> list[tuple[Piece, ...]]:
    """Whole documents in rows of `width`, longest first, each where the least room is left.

    Documents of more than `width` tokens are cut to it, or go on in rows of their own; those of
    none are left out. Equal lengths come in seeded order.
    """
    order = np.argsort(seeded_order(len(lengths), seed, 0))  # of each document, its place
    pieces = [piece for (piece,) in one_a_row(lengths, width, cut=cut)]
    pieces.sort(key=lambda piece: (-piece.length, order[piece.document]))
    rows: list[list[Piece]] = []
    spaces: list[int] = []  # the distinct rooms left, ascending
    by_space: dict[int, list[int]] = {}
    for piece in pieces:
        length = piece.length
        at = bisect_left(spaces, length)
        if at == len(spaces):
            rows.append([])
            row, space = len(rows) - 1, width
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[row].append(piece)
        if left := space - length:
            if left not in by_space:
                insort(spaces, left)
            by_space.setdefault(left, []).append(row)
    return [tuple(row) for row in rows]


def one_a_row(lengths: Array, width: int, *, cut: bool) -> list[tuple[Piece, ...]]:
    """One piece a row. A longer document is cut to `width`, or goes on in rows of its own."""
    return [
        (Piece(document, start, min(start + width, length)),)
        for document, length in enumerate(lengths.tolist())
        for start in range(0, min(length, width) if cut else length, width)
    ]
