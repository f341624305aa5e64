"""Answers to a few held-out prompts while a model trains: those of `run.samples`.

They are greedy, so that those of one evaluation compare with those of another. Each token is made
by a forward of an evaluation, of rows that are no more and no longer than the held-out ones: what a
plan and a certificate say of the phase `evaluate` holds of them, too, and no cache of keys and
values is held beside the optimizer's states. That costs a forward a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memfit.core.errors import InvalidRequest
from memfit.records.habits import RunRequest
from memfit.records.ledger import Phase
from memfit.records.recipe import Recipe
from memfit.records.shapes import RowBounds
from memfit.train.data.tokenizer import Tokenizer
from memfit.train.data.tokens import Corpus
from memfit.train.habits.next_tokens import check_next_tokens
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.step.build import Built
from memfit.train.step.loss import IGNORE
from memfit.train.step.step import Batch, evaluate

PROMPT = 32  # tokens of a text's beginning, at most, where all of it is learned
MULTIPLE = 16  # of which the width of a call is one
Ids = tuple[int, ...]


class Samples(NamedTuple):
    """The prompts that a run answers, and how far."""

    prompts: tuple[Ids, ...]
    tokens: int  # of an answer, at most
    limit: int  # tokens of prompt and answer, at most: what an evaluation is certified for
    end: int | None  # the token that ends an answer
    decode: Callable[[Sequence[int]], str]

    def answer(self, built: Built, observer: Observer = NOBODY) -> list[dict[str, Any]]:
        """Prompts with their answers, for a line of the log."""
        observer.enter(Phase.EVALUATE)
        rows, found = built.recipe.micro_batch, list[Ids]()
        for first in range(0, len(self.prompts), rows):
            found += self._answer(built, self.prompts[first : first + rows])
        return [
            {"prompt": self.decode(prompt), "completion": self.decode(answer), "reward": None}
            for prompt, answer in zip(self.prompts, found, strict=True)
        ]

    def _answer(self, built: Built, prompts: Sequence[Ids]) -> list[Ids]:
        """Greedy answers to as many prompts as a micro-batch has rows."""
        texts = [list(prompt) for prompt in prompts]
        most = [min(len(prompt) + self.tokens, self.limit) for prompt in prompts]
        width = min(self.limit, -(-max(most) // MULTIPLE) * MULTIPLE)
        if built.recipe.compile == "blocks":  # one shape more, whatever the prompts
            width = self.limit
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        open_rows = [row for row, text in enumerate(texts) if len(text) < most[row]]
        while open_rows:
            likeliest = _predict(built, ids)
            for row in list(open_rows):
                text = texts[row]
                token = int(likeliest[row, len(text) - 1])
                if token == self.end:
                    open_rows.remove(row)
                    continue
                ids[row, len(text)] = token
                text.append(token)
                if len(text) == most[row]:
                    open_rows.remove(row)
        return [tuple(t[len(p) :]) for t, p in zip(texts, prompts, strict=True)]


def _predict(built: Built, ids: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """(rows, tokens): the likeliest token behind each, by a forward of an evaluation."""
    pieces = []
    batch = Batch(
        ids.to(built.device),
        torch.full(ids.shape, IGNORE, dtype=torch.int64, device=built.device),
        see=lambda logits: pieces.append(logits.argmax(-1).to("cpu").numpy()),
    )
    evaluate(built, batch)
    return np.concatenate(pieces).reshape(ids.shape)


def choose_samples(
    corpus: Corpus, run: RunRequest, bounds: RowBounds, tokenizer: Tokenizer
) -> Samples:
    """The first held-out documents' beginnings: up to what is learned; of texts, half or a few
    tokens.

    Raises InvalidRequest where none is short enough for its rows.
    """
    limit = bounds.longest if bounds.documents else bounds.tokens
    prompts: list[Ids] = []
    for document in np.flatnonzero(corpus.lengths > 1).tolist():
        if len(prompts) == run.samples:
            break
        begin, end = (int(corpus.offsets[document + i]) for i in (0, 1))
        learned = None if corpus.learned is None else np.asarray(corpus.learned[begin:end])
        size = min(PROMPT, (end - begin) // 2)
        if learned is not None and not learned[0]:
            size = int(np.argmax(learned > 0))
        if 0 < size < limit:
            prompts.append(tuple(np.asarray(corpus.tokens[begin : begin + size]).tolist()))
    if not prompts:
        raise InvalidRequest(
            f"`run.samples: {run.samples}`: no held-out document begins with a prompt of less than"
            f" {limit} tokens, as many as its rows have",
            hint="leave it out, or use a longer `task.sequence_length`",
        )
    return Samples(tuple(prompts), run.sample_tokens, limit, tokenizer.end, tokenizer.decode)


def check_samples(recipe: Recipe, run: RunRequest, *, held_out: bool) -> None:
    """Raise InvalidRequest, before the first step, where nothing can be answered."""
    if not run.samples:
        return
    check_next_tokens(
        recipe, f"`run.samples: {run.samples}`", held_out=held_out,
        reads="answers held-out prompts",
        objection=f"begins answers as held-out rows begin, and `objective: {recipe.objective}` has"
        " no such rows",
        hint="leave it out"
        + (": the log has answers of every rollout" if recipe.samples else ""),
    )  # fmt: skip
