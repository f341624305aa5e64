"""Rows of several data sets, each with its share: a pure function of the row's number.

Each data set has its own endless sequence of rows, epoch after epoch, of which none is left out and
none is shown early. Which data set a row is of is decided in blocks: a block has as many rows of
each as its share says, to the row, in a seeded order of their own. Resuming needs one integer, as
without a mixture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from memfit.train.data.packing import Array, Piece, Rows, seeded_order
from memfit.train.data.tokens import Corpus, Share

BLOCK = 1024  # rows, or pairs, within which shares are exact; more where a share is tiny
ORDER = 2  # of `seeded_order`: what this order is for


class Joined:
    """Tokens of several data sets one after the other; slices within one document are read."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self._begins = np.cumsum([0, *(len(array) for array in arrays[:-1])])

    def __getitem__(self, cut: slice) -> Array:
        at = int(np.searchsorted(self._begins, cut.start, side="right")) - 1
        begin = int(self._begins[at])
        return self._arrays[at][cut.start - begin : cut.stop - begin]


def join(shares: Sequence[Share]) -> Corpus:
    """All data sets as one corpus, whose documents are theirs one after the other."""
    parts = [share.corpus for share in shares]
    offsets, begin = [np.zeros(1, dtype="int64")], 0
    for part in parts:
        offsets.append(np.asarray(part.offsets[1:]) + begin)
        begin += int(part.offsets[-1])
    tokens: Any = Joined([part.tokens for part in parts])
    learned: Any = None
    if any(part.learned is not None for part in parts):
        one = np.uint8(1)
        learned = Joined([
            np.broadcast_to(one, len(part.tokens)) if part.learned is None else part.learned
            for part in parts
        ])  # fmt: skip
    facts = [[share.corpus.digest, share.share] for share in shares]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return Corpus(tokens, np.concatenate(offsets), learned, digest, (), parts=tuple(shares))


class Turns:
    """Which data set a unit is of: within a block, as many of each as its share says."""

    def __init__(self, shares: Sequence[float], seed: int) -> None:
        self._edges = np.concatenate([[0.0], np.cumsum(shares)])[:-1]
        self._block = BLOCK
        while self._block * min(shares) < 2:
            self._block *= 2
        self._order = lru_cache(maxsize=4)(lambda block: self._label(block, seed))

    def _before(self, block: int) -> Array:
        """(sources,): how many units of each data set lie before a block."""
        count = block * self._block
        return np.diff(np.append(np.rint(count * self._edges), count)).astype("int64")

    def _label(self, block: int, seed: int) -> tuple[Array, Array]:
        """Of each unit of a block its data set, and the number of that one's unit."""
        first = self._before(block)
        counts = self._before(block + 1) - first
        numbers = np.concatenate([
            np.arange(begin, begin + count) for begin, count in zip(first, counts, strict=True)
        ])  # fmt: skip
        labels = np.repeat(np.arange(len(counts)), counts)
        order = np.empty(self._block, dtype="int64")
        order[:] = labels[seeded_order(self._block, seed, block, ORDER)]
        shown = np.empty(self._block, dtype="int64")
        # the units of a data set come in their own order, wherever they stand
        shown[np.argsort(order, kind="stable")] = numbers
        return order, shown

    def find(self, units: Array) -> tuple[Array, Array]:
        """Of each of some ascending units its data set, and the number of that one's unit."""
        sources, numbers = np.empty(len(units), dtype="int64"), np.empty(len(units), dtype="int64")
        for block in range(int(units[0]) // self._block, int(units[-1]) // self._block + 1):
            inside = units // self._block == block
            order, shown = self._order(block)
            at = units[inside] % self._block
            sources[inside], numbers[inside] = order[at], shown[at]
        return sources, numbers


class Source(NamedTuple):
    """The rows of one data set, and where its documents begin among all."""

    rows: Rows
    first_document: int
    share: float


class MixedRows(Rows):
    """Rows of several data sets. `unit`: rows that stay together, 2 where they are pairs."""

    def __init__(self, sources: Sequence[Source], seed: int, unit: int = 1) -> None:
        self.packed = sources[0].rows.packed
        self._sources, self._unit = sources, unit
        self._turns = Turns([source.share for source in sources], seed)
        self._once = np.cumsum([0, *(source.rows.rows_once for source in sources)])

    @property
    def per_epoch(self) -> float:
        """Rows after which each data set has been shown whole, as `datasets` counts them for
        `all_exhausted`."""
        return max(source.rows.per_epoch / source.share for source in self._sources)

    @property
    def rows_once(self) -> int:
        """Those of all data sets."""
        return int(self._once[-1])

    @property
    def ends_early(self) -> bool:
        """Whether one of them does."""
        return any(source.rows.ends_early for source in self._sources)

    def _places(self, first: int, count: int, *, once: bool) -> tuple[Array, Array]:
        """Of each row from `first` on its data set, and its number there."""
        indices = np.arange(first, first + count)
        if once:
            sources = np.searchsorted(self._once, indices, side="right") - 1
            sources = np.minimum(sources, len(self._sources) - 1)
            return sources, indices - self._once[sources]
        units, within = np.divmod(indices, self._unit)
        sources, numbers = self._turns.find(units)
        return sources, numbers * self._unit + within

    def row(self, index: int, *, once: bool = False) -> tuple[Piece, ...]:
        """A row of the data set whose turn it is; with `once`, of one after the other."""
        (at,), (number,) = self._places(index, 1, once=once)
        source = self._sources[int(at)]
        pieces = source.rows.row(int(number), once=once)
        return tuple(Piece(p.document + source.first_document, p.start, p.stop) for p in pieces)

    def costs(self, first: int, count: int, *, once: bool = False) -> Array:
        """Of each data set's rows, which come in their own order."""
        sources, numbers = self._places(first, count, once=once)
        found = np.zeros((count, 3), dtype="int64")
        for at, source in enumerate(self._sources):
            mine = sources == at
            if mine.any():
                low, high = int(numbers[mine].min()), int(numbers[mine].max())
                costs = source.rows.costs(low, high + 1 - low, once=once)
                found[mine] = costs[numbers[mine] - low]
        return found


def mix(
    corpus: Corpus, build: Callable[..., tuple[Rows, tuple[str, ...]]], seed: int, unit: int
) -> tuple[Rows, tuple[str, ...]]:
    """The rows of several data sets by their shares, and what the user should know about each.

    build: what makes the rows of one, called with its corpus and its `name`.
    """
    sources, notes, first = list[Source](), list[str](), 0
    for part in corpus.parts:
        rows, more = build(part.corpus, name=part.name)
        sources.append(Source(rows, first, part.share))
        first += part.corpus.documents
        says = f"{part.share:.1%} of the rows are of `{part.name}`, which has {rows.per_epoch:,.1f}"
        notes += [*more, says]
    mixed = MixedRows(sources, seed, unit)
    return mixed, (*notes, f"after {mixed.per_epoch:,.0f} rows each data set has been shown whole")
