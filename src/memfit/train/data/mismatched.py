"""Answers to other prompts, from which KTO estimates how far the policy is from its reference.

Each document has one other document, whose answer is read behind its own prompt: the one before it
in a seeded order, of those with another prompt. It is the same in every epoch and whatever the
micro-batch, so that the reference's log-probability of it can be computed once.
"""

from __future__ import annotations

import numpy as np

from memfit.core.errors import InvalidRequest
from memfit.train.data.packing import Array, RowTable, TableRows, seeded_order
from memfit.train.data.tokens import Corpus

PURPOSE = 2  # of the seeded order: another than an epoch's


class MismatchedRows(TableRows):
    """One answer a row, beside which the answer to another prompt is read."""

    def __init__(self, rows: RowTable, corpus: Corpus, width: int, seed: int, name: str) -> None:
        """Raises InvalidRequest where all examples have the same prompt."""
        super().__init__(rows, width, seed, packed=False)
        self._corpus = corpus
        documents = [piece.document for (piece,) in rows]
        self.prompts = {d: self._count_prompt(d) for d in documents}  # tokens of each one's
        self.others = self._find_others(np.array(documents), seed, name)
        self._least = np.array([self.length(d) for d in documents])

    def length(self, document: int) -> int:
        """Tokens of its prompt with the other document's answer, which is cut to a row."""
        other = self.others[document]
        answer = int(self._corpus.lengths[other]) - self.prompts[other]
        return min(self._width, self.prompts[document] + answer)

    def read(self, document: int) -> tuple[Array, Array]:
        """Ids of its prompt with the other document's answer, uncut, and which are learned."""
        corpus, prompt, other = self._corpus, self.prompts[document], self.others[document]
        begin = int(corpus.offsets[document])
        start = int(corpus.offsets[other]) + self.prompts[other]
        end = int(corpus.offsets[other + 1])
        ids = np.concatenate([corpus.tokens[begin : begin + prompt], corpus.tokens[start:end]])
        learned = np.zeros(len(ids), dtype="uint8")
        learned[prompt:] = 1 if corpus.learned is None else corpus.learned[start:end]
        return ids.astype("int64"), learned

    def _count_prompt(self, document: int) -> int:
        begin, end = (int(self._corpus.offsets[document + i]) for i in (0, 1))
        if self._corpus.learned is None:
            return 0
        return int(np.argmax(self._corpus.learned[begin:end] != 0))

    def _find_others(self, documents: Array, seed: int, name: str) -> dict[int, int]:
        order = documents[seeded_order(len(documents), seed, 0, PURPOSE)].tolist()
        before: int | None = None  # the last document seen whose prompt is another one
        found: dict[int, int] = {}
        for _ in range(2):  # the order is a ring: the first ones follow the last ones
            last: int | None = None
            for document in order:
                if last is not None and self._prompt(last) != self._prompt(document):
                    before = last
                if before is not None and self._prompt(before) != self._prompt(document):
                    found[document] = before
                last = document
            order = [order[-1], *order]
        if len(found) < len(documents):
            raise InvalidRequest(
                f"all examples of `{name}` have the same prompt, and `objective: kto` compares"
                " with answers to others",
                hint="use `preference.loss_type: apo_zero_unpaired`, which has no such baseline",
            )
        return found

    def _prompt(self, document: int) -> bytes:
        begin = int(self._corpus.offsets[document])
        return bytes(self._corpus.tokens[begin : begin + self.prompts[document]].tobytes())
