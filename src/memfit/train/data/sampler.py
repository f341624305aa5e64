"""The micro-batches of a run, in numbers, from the rows of `train.packing`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import InvalidRequest
from memfit.objectives import find_objective
from memfit.parallelism.context import own_parts, row_multiple
from memfit.records.recipe import Recipe
from memfit.records.shapes import RowBounds
from memfit.train.data.mismatched import MismatchedRows
from memfit.train.data.mixture import mix
from memfit.train.data.packed_rows import read_packed_rows
from memfit.train.data.packing import (
    Array,
    PairRows,
    Piece,
    Rows,
    StreamRows,
    TableRows,
    one_a_row,
)
from memfit.train.data.tokens import Corpus

BLOCK = 2**16  # micro-batches whose memory is compared at once
IGNORED = -100  # the label of a position that predicts nothing


class Rated(NamedTuple):
    """What rated answers are, and answers to other prompts where the loss has them."""

    desirable: Array  # (rows,) bool
    input_ids: Array | None = None  # (rows, width): each row's prompt with another one's answer
    labels: Array | None = None
    reference: Array | None = None  # (rows,) float32: log-probabilities computed beforehand


class Micro(NamedTuple):
    """One micro-batch in numbers: (rows, width) int64 arrays and each row's document lengths."""

    input_ids: Array
    labels: Array  # the token each position predicts, or -100
    # within the document; (1, width) where ranks share rows; None when a row is one document
    position_ids: Array | None
    documents: tuple[tuple[int, ...], ...] | None  # sums to width in each row; None likewise
    tokens: int  # padding not counted
    reference: Array | None = None  # (rows,) float32: log-probabilities computed beforehand
    # (rows, width), of pairs: labels of preferred rows' tokens that are of no answer, or -100
    context: Array | None = None
    rated: Rated | None = None
    # of ranks that share the tokens of rows: rows, or pairs, to learn, which the first one counts
    learned_rows: int | None = None

    @property
    def targets(self) -> int:
        """Positions that predict a token."""
        return int((self.labels != IGNORED).sum())

    @property
    def pairs(self) -> int:
        """Pairs of neighbouring rows with an answer to learn."""
        if self.learned_rows is not None:
            return self.learned_rows
        return int((self.labels[::2] != IGNORED).any(axis=1).sum())

    @property
    def answers(self) -> int:
        """Rows with an answer to learn."""
        if self.learned_rows is not None:
            return self.learned_rows
        return int((self.labels != IGNORED).any(axis=1).sum())

    @property
    def learned_beside(self) -> int:
        """Tokens of preferred rows that a cross-entropy beside the pairs' loss is of."""
        count = int((self.labels[::2] != IGNORED).sum())
        return count if self.context is None else count + int((self.context != IGNORED).sum())


class Sampler:
    """The batches of a recipe over a corpus, as one of its ranks reads them.

    A global batch is the same rows whatever the ranks: its micro-batches are dealt to them in
    turn, so that micro-batch i of data-parallel rank r is number i * ranks + r. Ranks that share
    the tokens of rows have columns of them each.
    """

    def __init__(
        self, corpus: Corpus, rows: Rows, recipe: Recipe, notes: tuple[str, ...], rank: int = 0
    ) -> None:
        self.corpus = corpus
        self.notes = notes
        self._rows = rows
        self._micro = recipe.micro_batch
        self._accumulation = recipe.accumulation
        self._global = recipe.global_batch
        self._width = recipe.sequence_length
        self._multiple = row_multiple(recipe.parallel)  # which a row's tokens are a multiple of
        if recipe.parallel.pp > 1:  # stages send each other one shape
            self._multiple = recipe.sequence_length
        self._parallel, self._process = recipe.parallel, rank
        self._steps, self._pairs = recipe.steps, recipe.prefers
        self._learns, self._rates, self._scores = recipe.learns, recipe.rates, recipe.scores
        self._ranks, self._rank = recipe.parallel.dp, recipe.parallel.share(rank)
        # (documents,) float32, or (2, documents) with answers to other prompts: see
        # `train.step.reference_log_probs`
        self.reference: Array | None = None
        self.padding: int | None = None  # an id that is scored nowhere

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps that see every token once."""
        return self._rows.per_epoch / self._global

    def sample(self, step: int) -> list[Micro]:
        """The micro-batches of one optimizer step that are this rank's."""
        mine = range(self._rank, self._accumulation * self._ranks, self._ranks)
        return [self._batch(step * self._global + i * self._micro) for i in mine]

    def documents_of(self, index: int) -> list[int]:
        """The documents of this rank's micro-batch `index` of the first epoch, one a row, as far as
        it goes."""
        first = (index * self._ranks + self._rank) * self._micro
        rows = range(first, first + self._micro)
        return [p.document for i in rows for p in self._rows.row(i, once=True)]

    def all_once(self, tokens: int = 0) -> Iterator[Micro]:
        """Rows of the first epoch once, in micro-batches: what an evaluation reads.

        tokens: read the first rows that together hold this many, the same for any micro-batch and
        layout; 0 is every row. The last micro-batch is filled up with rows that predict nothing; of
        ranks, each reads as many, in turn.
        """
        count = self._first_rows(tokens) if tokens else self._count_once()
        rounds = range(0, count, self._micro * self._ranks)
        mine = self._rank * self._micro
        return (self._batch(first + mine, below=count) for first in rounds)

    def reads_all(self, tokens: int) -> bool:
        """Whether `all_once(tokens)` reads every row."""
        return not tokens or self._first_rows(tokens) >= self._count_once()

    def _first_rows(self, tokens: int) -> int:
        """How many rows hold `tokens` or more and something to predict; pairs stay whole."""
        count, read, predicts, each = 0, 0, False, 2 if self._pairs else 1
        while count < self._count_once() and not (predicts and read >= tokens):
            for row in (self._rows.row(i, once=True) for i in range(count, count + each)):
                read += sum(p.length for p in row)
                predicts = predicts or any((self._read(p)[1] != IGNORED).any() for p in row)
            count += each
        return count

    def bounds(self) -> RowBounds:
        """What no micro-batch of the run exceeds, on any rank."""
        micros = self._steps * self._accumulation * self._ranks
        found = np.zeros(3, dtype="int64")
        for start in range(0, micros, BLOCK):
            count = min(BLOCK, micros - start)
            costs = self._rows.costs(start * self._micro, count * self._micro)
            found = np.maximum(found, self._largest(costs))
        return self._as_bounds(found)

    def bounds_once(self) -> RowBounds:
        """What no micro-batch of `all_once` exceeds. Where rows are short, padding fills them."""
        count, each = self._count_once(), self._micro * self._ranks
        filled = -(-count // each) * each
        costs = self._rows.costs(0, count, once=True)
        padding = np.array([[0, 1, self._width if self._rows.packed else 0]])
        found = self._largest(np.concatenate([costs, np.repeat(padding, filled - count, axis=0)]))
        if self._rows.ends_early:
            found[2] = self._width  # the last row ends early
        return self._as_bounds(found)

    def _largest(self, costs: Array) -> Array:
        """Of micro-batches: tokens of a row, documents of all rows, the longest document."""
        tokens, documents, longest = costs.reshape(-1, self._micro, 3).transpose(2, 0, 1)
        return np.array([tokens.max(), documents.sum(axis=1).max(), longest.max()])

    def _as_bounds(self, found: Array) -> RowBounds:
        tokens, documents, longest = (int(x) for x in found)
        return RowBounds(
            tokens=self._padded(tokens) // self._parallel.cp,
            documents=documents if self._rows.packed else 0,
            longest=longest,
        )

    def _padded(self, tokens: int) -> int:
        return -(-tokens // self._multiple) * self._multiple

    def _count_once(self) -> int:
        return self._rows.rows_once

    def _batch(self, first: int, *, below: int | None = None) -> Micro:
        """The rows from `first` on; below: of the first epoch, and empty from that one on."""
        numbers, once = range(first, first + self._micro), below is not None
        rows = [self._rows.row(i, once=once) if below is None or i < below else () for i in numbers]
        packed = self._rows.packed
        width = self._width
        if not packed:
            width = self._padded(max(1, *(self._length(row) for row in rows)))
        ids = np.zeros((len(rows), width), dtype="int64")
        labels = np.full((len(rows), width), IGNORED, dtype="int64")
        positions = np.zeros((len(rows), width), dtype="int64")
        documents = []
        for i, row in enumerate(rows):
            at = 0
            for piece in row:
                end = at + piece.length
                ids[i, at:end], labels[i, at:end] = self._read(piece)
                positions[i, at:end] = np.arange(piece.length)
                at = end
            if self._scores:
                _mark_last(ids[i, :at], labels[i], self.padding)
            padding = width - at
            positions[i, at:] = np.arange(padding)
            documents.append((*(p.length for p in row), *((padding,) if padding else ())))
        tokens = sum(p.length for row in rows for p in row)
        if not packed:
            reference, context = self._look_up(rows), self._find_context(rows, labels)
            rated = self._rate(rows, ids.shape)
            micro = Micro(ids, labels, None, None, tokens, reference, context, rated)
            if self._parallel.cp > 1:
                return self._own(micro, [sum(p.length for p in row) for row in rows])
            return micro
        return Micro(ids, labels, positions, tuple(documents), tokens)

    def _own(self, micro: Micro, lengths: list[int]) -> Micro:
        """This rank's columns of whole rows, and which ones they are."""
        width, first = micro.labels.shape[1], self._parallel.place(self._process) == 0
        columns = np.concatenate(own_parts(width, self._parallel, self._process))

        def cut(whole: Array | None) -> Any:
            return None if whole is None else np.take(whole, columns, axis=1)

        rated = micro.rated
        if rated is not None:
            rated = rated._replace(input_ids=cut(rated.input_ids), labels=cut(rated.labels))
        learned = micro.pairs if self._pairs else micro.answers
        return micro._replace(
            input_ids=cut(micro.input_ids), labels=cut(micro.labels), position_ids=columns[None],
            tokens=sum(int((columns < length).sum()) for length in lengths),
            context=cut(micro.context), rated=rated, learned_rows=learned if first else 0,
        )  # fmt: skip

    def _length(self, row: tuple[Piece, ...]) -> int:
        own = sum(p.length for p in row)
        if not isinstance(self._rows, MismatchedRows):
            return own
        return max([own, *(self._rows.length(p.document) for p in row)])

    def _rate(self, rows: list[tuple[Piece, ...]], shape: tuple[int, ...]) -> Rated | None:
        """What the rows' answers are, and the answers to other prompts beside them."""
        if not self._rates:
            return None
        known = self.corpus.is_desirable
        desirable = np.array([bool(row) and known(row[0].document) for row in rows])
        if not isinstance(self._rows, MismatchedRows):
            return Rated(desirable)
        ids, labels = np.zeros(shape, dtype="int64"), np.full(shape, IGNORED, dtype="int64")
        for i, row in enumerate(rows):
            for piece in row:  # one a row
                found, learned = self._rows.read(piece.document)
                length = min(len(found), self._width)
                ids[i, :length] = found[:length]
                after = np.flatnonzero(learned[1 : length + 1])
                labels[i, after] = found[1:][after]
        return Rated(desirable, ids, labels, self._look_up(rows, mismatched=True))

    def _look_up(self, rows: list[tuple[Piece, ...]], *, mismatched: bool = False) -> Array | None:
        """The reference's log-probability of each row; 0 for rows of padding."""
        if self.reference is None:
            return None
        known = self.reference if self.reference.ndim == 1 else self.reference[int(mismatched)]
        found = [known[row[0].document] if row else 0.0 for row in rows]
        return np.array(found, dtype="float32")

    def _find_context(self, rows: list[tuple[Piece, ...]], labels: Array) -> Array | None:
        """What preferred rows say beside their answers, where the objective learns it."""
        if self._learns != "conversations":
            return None
        context = np.full_like(labels, IGNORED)
        for i, row in enumerate(rows[::2]):
            for piece in row:  # one a row
                context[2 * i, : piece.length] = self._read(piece, whole=True)[1]
        context[labels != IGNORED] = IGNORED
        return context

    def _read(self, piece: Piece, *, whole: bool = False) -> tuple[Array, Array]:
        """Ids and labels of a piece; its last token predicts the next one of its document.

        whole: labels of all tokens, not of answers alone.
        """
        offset, after = (int(self.corpus.offsets[piece.document + i]) for i in (0, 1))
        start, stop = offset + piece.start, offset + piece.stop
        ids = self.corpus.tokens[start : min(stop + 1, after)].astype("int64")
        labels = np.full(piece.length, IGNORED, dtype="int64")
        labels[: len(ids) - 1] = ids[1:]
        if self.corpus.learned is not None and not whole:
            learned = self.corpus.learned[start + 1 : start + len(ids)]
            labels[: len(ids) - 1][learned == 0] = IGNORED
        return ids[: piece.length], labels


def _mark_last(ids: Array, labels: Array, padding: int | None) -> None:
    """Mark the token that is scored, in place: the last one that is no padding, where transformers'
    classes of sequence classification find it, too."""
    labels[:] = IGNORED
    real = np.flatnonzero(ids != padding) if padding is not None else np.arange(len(ids))
    if len(ids):
        last = int(real[-1]) if len(real) else 0
        labels[last] = ids[last]


def build_sampler(corpus: Corpus, recipe: Recipe, name: str, rank: int = 0) -> Sampler:
    """The sampler that a recipe asks for; `name` is how the data is called in messages.

    rank: the one that reads.

    Raises InvalidRequest when nothing is left to learn.
    """
    rows, notes = build_rows(
        corpus, objective=recipe.objective, packing=recipe.packing, width=recipe.sequence_length,
        seed=recipe.seed, name=name,
    )  # fmt: skip
    if recipe.mismatches:
        if corpus.parts:
            raise InvalidRequest(
                f"`task.data: {name}` has several data sets, and `preference.loss_type:"
                f" {recipe.preference.loss_type}` sets answers beside other prompts of one",
                hint="join them in one file, or use a loss without a baseline of other answers",
            )
        assert isinstance(rows, TableRows)
        rows = MismatchedRows(rows.table, corpus, recipe.sequence_length, recipe.seed, name)
    return Sampler(corpus, rows, recipe, notes, rank)


def build_rows(
    corpus: Corpus, *, objective: str, packing: bool, width: int, seed: int, name: str
) -> tuple[Rows, tuple[str, ...]]:
    """The endless sequence of rows, and what the user should know about it.

    Fine-tuning examples longer than a row are cut and counted; those of which no answer is left
    are left out and counted. Plain texts, learned whole, go on in rows of their own.
    """
    if corpus.parts:
        build = partial(build_rows, objective=objective, packing=packing, width=width, seed=seed)
        return mix(corpus, build, seed, find_objective(objective).least_rows)
    sft = objective != "pretrain"
    cut = sft and corpus.learned is not None  # answers alone are learned
    lengths, notes = np.asarray(corpus.lengths), list(corpus.notes)
    if cut:
        lengths, more = _fit(corpus, width, name)
        notes += more
    elif lengths.max(initial=0) < 2:
        raise InvalidRequest(f"`{name}` has no token that another one predicts")
    rows: Rows
    if find_objective(objective).pairs:
        rows = _pair_rows(lengths, width, seed, name)
    elif packing and not sft:
        rows = StreamRows(lengths, width, seed)
    elif packing:
        rows = TableRows(
            read_packed_rows(corpus, lengths, width, seed, cut=cut), width, seed, packed=True
        )
    else:
        rows = TableRows(one_a_row(lengths, width, cut=cut), width, seed, packed=False)
    return rows, tuple(notes)


def _pair_rows(lengths: Array, width: int, seed: int, name: str) -> PairRows:
    whole = np.minimum(lengths, width)
    rows = PairRows(whole, seed)
    if not rows.per_epoch:
        raise InvalidRequest(
            f"no pair of `{name}` has both answers within sequence_length {width}",
            hint="use a longer sequence_length",
        )
    return rows


def _fit(corpus: Corpus, width: int, name: str) -> tuple[Array, list[str]]:
    """Lengths of fine-tuning examples, 0 for those that are left out, and notes for the user."""
    lengths = np.array(corpus.lengths)
    long = np.flatnonzero(lengths > width)
    refused = 0
    if corpus.learned is not None:
        learned = np.asarray(corpus.learned)  # slices of a memory map take ten times as long
        begins = (corpus.offsets[long] + 1).tolist()
        unlearned = [not learned[begin : begin + width].any() for begin in begins]
        refused = sum(unlearned)
        lengths[long[unlearned]] = 0
        corpus.forget()
    if not lengths.any():
        raise InvalidRequest(
            f"no example of `{name}` has an answer within sequence_length {width}",
            hint=f"the shortest example has {_find_shortest(corpus)} tokens",
        )
    notes = []
    if cut := len(long) - refused:
        notes.append(f"{cut} examples of `{name}` are cut to sequence_length {width}")
    if refused:
        notes.append(
            f"{refused} examples of `{name}` are left out: no answer within {width} tokens"
        )
    return lengths, notes


def _find_shortest(corpus: Corpus) -> int:
    lengths = corpus.lengths
    return int(lengths[lengths > 0].min(initial=lengths.max(initial=0)))
