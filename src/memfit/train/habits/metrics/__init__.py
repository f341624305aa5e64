"""Figures of an evaluation that a user's own functions compute: those of `run.metrics`.

A function gets `predictions` and `labels`, two arrays of whole numbers, (rows, tokens), of all that
an evaluation read: the likeliest token of each position, and the token that stands there, -100
where nothing is to be predicted. Both are aligned: nothing has to be shifted. It returns a number,
which has the function's name, or names and numbers. No logits are held: the likeliest tokens of
each micro-batch go to host memory when its loss is there, as those of transformers' Trainer do with
a `preprocess_logits_for_metrics` that takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.registry import Registry
from memfit.records.recipe import Recipe
from memfit.train.data.packing import Array
from memfit.train.distributed.ranks import Ranks
from memfit.train.habits.next_tokens import check_next_tokens
from memfit.train.habits.own_functions import find_function
from memfit.train.step.loss import IGNORE

Metric = Callable[[Array, Array], float | Mapping[str, float]]

metrics: Registry[Metric] = Registry("metric", "memfit.train.habits.metrics")

# figures of an evaluation that are no metric's
OWN = ("loss", "targets", "whole", "error", "reward", "seconds")
KEY = "run.metrics"


class Predicted:
    """What one evaluation predicted, row by row, in host memory: 8 bytes a token for both."""

    def __init__(self) -> None:
        self._batches: list[list[tuple[Array, Array]]] = []  # rows of each micro-batch
        self._pieces: list[Array] = []

    def see(self, logits: Tensor) -> None:
        """Keep the likeliest token of each row of logits (tokens, vocab), the next of a batch."""
        self._pieces.append(logits.argmax(-1).to("cpu").numpy().astype("int32"))

    def end_batch(self, labels: Array) -> None:
        """The logits of all tokens of a micro-batch were seen; labels: (rows, tokens)."""
        found = np.concatenate(self._pieces).reshape(labels.shape)
        self._pieces = []
        targets = (labels != IGNORE).any(axis=1)
        self._batches.append(
            list(zip(found[targets], labels[targets].astype("int32"), strict=True))
        )

    def gather(self, ranks: Ranks) -> tuple[Array, Array]:
        """Predictions and labels of all ranks, (rows, tokens) int64, shorter rows filled up with
        -100 on the right."""
        batches = self._batches
        if ranks.size > 1:
            own = json.dumps([[[p.tolist(), y.tolist()] for p, y in rows] for rows in batches])
            of_ranks = [json.loads(text) for text in ranks.gather_texts(own)]
            turns = zip(*of_ranks, strict=True)  # ranks read micro-batches in turn
            batches = [rows for turn in turns for rows in turn]
        rows = [(np.array(p), np.array(label)) for batch in batches for p, label in batch]
        width = max(len(label) for _, label in rows)
        both = np.full((2, len(rows), width), IGNORE, dtype="int64")
        for at, (predicted, label) in enumerate(rows):
            both[0, at, : len(label)], both[1, at, : len(label)] = predicted, label
        return both[0], both[1]


class Metrics:
    """The functions of a run."""

    def __init__(self, names: Sequence[str], best_by: str, warn: Callable[[str], None]) -> None:
        """Raises InvalidRequest or UnknownName for a function that there is not."""
        self._open = {name: find_function(name, KEY, metrics) for name in names}
        self._best_by, self._warn = best_by, warn
        self.figures: dict[str, str] = {}  # name of a figure -> function that gives it

    def __bool__(self) -> bool:
        return bool(self._open)

    def rehearse(self, labels: Array) -> None:
        """Call each once before the first step, as if all were predicted right.

        Raises InvalidRequest: a function that fails, or a figure by a name that is taken.
        """
        predictions = np.where(labels == IGNORE, 0, labels)
        for name, function in self._open.items():
            try:
                found = _call(name, function, predictions, labels)
            except Exception as error:
                raise InvalidRequest(
                    f"`{KEY}: {name}` fails of {labels.shape[0]} rows that are predicted right:"
                    f" {error!r}",
                    hint="it gets predictions and labels, (rows, tokens) each, labels of -100 where"
                    " nothing is predicted, and returns a number or names with numbers",
                ) from None
            for figure in found:
                if figure in OWN or figure in self.figures:
                    taken = self.figures.get(figure, "memfit")
                    raise InvalidRequest(
                        f"`{KEY}: {name}` gives `{figure}`, which is a figure of `{taken}`",
                        hint="give it another name",
                    )
                self.figures[figure] = name
        if self._best_by and self._best_by not in (*self.figures, "loss"):
            raise InvalidRequest(
                f"`run.best_by: {self._best_by}` is no figure of an evaluation of this run",
                hint=f"one of: {', '.join(('loss', *self.figures))}",
            )

    def compute(self, predicted: Predicted, ranks: Ranks) -> dict[str, float]:
        """The figures of an evaluation, the same on all ranks: the first one's functions work.

        A function that fails is named and called no more, unless its figure is what evaluations
        are compared by: that raises RunFailed.
        """
        predictions, labels = predicted.gather(ranks)
        answer = ranks.from_first(lambda: json.dumps(self._compute(predictions, labels)))
        found: dict[str, float] = json.loads(answer)
        return found

    def _compute(self, predictions: Array, labels: Array) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, function in list(self._open.items()):
            try:
                figures = _call(name, function, predictions, labels)
                self._check_figures(name, figures)
            except Exception as error:  # whatever a user's own code raises
                text = f"`{KEY}: {name}` failed: {error!r}"
                if self.figures.get(self._best_by) == name:
                    raise RunFailed(
                        f"{text}, and `run.best_by: {self._best_by}` compares by it",
                        hint="mend the function and start the same command again: it goes on from"
                        " the newest checkpoint",
                    ) from None
                del self._open[name]
                self._warn(f"{text}; it is called no more")
                continue
            found |= figures
        return found

    def _check_figures(self, name: str, figures: Mapping[str, float]) -> None:
        named = {figure for figure, by in self.figures.items() if by == name}
        if set(figures) != named:
            raise ValueError(f"it gave {sorted(figures)}, and {sorted(named)} before")


def _call(name: str, function: Metric, predictions: Array, labels: Array) -> dict[str, float]:
    """Names and finite numbers of what a function returns; ValueError or TypeError for others."""
    answer: Any = function(predictions.copy(), labels.copy())
    if not isinstance(answer, Mapping):
        answer = {name.rpartition(":")[2]: answer}
    found = {str(figure): float(value) for figure, value in answer.items()}
    for figure, value in found.items():
        if not math.isfinite(value):
            raise ValueError(f"`{figure}` is {value}")
    return found


def check_metrics(recipe: Recipe, names: Sequence[str], *, held_out: bool) -> None:
    """Raise InvalidRequest, before the first step, where there is nothing to compute with."""
    if not names:
        return
    check_next_tokens(
        recipe, f"`{KEY}: [{', '.join(names)}]`", held_out=held_out,
        reads="is of evaluations",
        objection=f"is of predicted tokens, and `objective: {recipe.objective}`"
        " predicts none of its held-out rows",
        hint="leave it out: an evaluation has figures of its own, such as `reward_accuracy`",
    )  # fmt: skip
