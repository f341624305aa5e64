"""Which evaluation of a run is its best, and when a run stops because none has been better.

Both are functions of the log's lines, so that a run that goes on needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.records.habits import RunRequest
from memfit.records.recipe import Recipe

PREFIX = "evaluation_"  # of what an evaluation adds to a line of the log
REWARD = "reward"  # of answers to held-out prompts, where answers are sampled


class Judged(NamedTuple):
    """What the evaluations so far say."""

    best: int = 0  # the step of the best one, the first of equal ones; 0: there is none
    value: float = 0.0  # of that one
    stops: bool = False  # as many as `patience` in turn were no better


def judge(evaluations: Sequence[tuple[int, float]], run: RunRequest) -> Judged:
    """Compare evaluations in their order, as transformers' Trainer and its EarlyStoppingCallback.

    An evaluation is the best where it is better than all before it; where it is better by no more
    than `min_improvement` it does not end the wait. evaluations: step and value.
    """
    best, value, waited = 0, 0.0, 0
    for step, found in evaluations:
        gain = found - value if run.rises else value - found
        if not best or gain > run.min_improvement:
            waited = 0
        else:
            waited += 1
        if not best or gain > 0:
            best, value = step, found
        if run.patience and waited >= run.patience:
            return Judged(best, value, stops=True)
    return Judged(best, value)


def read_evaluations(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Step and value of each evaluation in lines of the log; name: of `run.best_by`.

    Raises InvalidRequest where an evaluation has no such figure, naming those that it has.
    """
    found = []
    for row in rows:
        if f"{PREFIX}loss" not in row and f"{PREFIX}{REWARD}" not in row:
            continue
        if f"{PREFIX}{name}" not in row:
            figures = [k.removeprefix(PREFIX) for k, v in row.items() if _is_figure(k, v)]
            raise InvalidRequest(
                f"`run.best_by: {name}` is no figure of an evaluation of this run",
                hint=f"one of: {', '.join(figures)}",
            )
        value = row[f"{PREFIX}{name}"]
        if value is not None:  # nobody judged the answers
            found.append((int(row["step"]), float(value)))
    return found


def _is_figure(key: str, value: object) -> bool:
    named = key.startswith(PREFIX) and key != f"{PREFIX}targets"
    return named and isinstance(value, int | float) and not isinstance(value, bool)


def check_best(recipe: Recipe, run: RunRequest, *, held_out: bool) -> None:
    """Raise InvalidRequest, before the first step, where nothing can be compared."""
    if recipe.samples and run.best_by not in ("", REWARD):
        raise InvalidRequest(
            f"`run.best_by: {run.best_by}` under `objective: {recipe.objective}`: held-out prompts"
            " are judged by the mean reward of their answers",
            hint="use `run.best_by: reward`",
        )
    if run.best_by and not held_out:
        raise InvalidRequest(
            f"`run.best_by: {run.best_by}` compares evaluations, and `task.evaluation` names no"
            " held-out data",
            hint="set `task.evaluation`, a file or folder, or `task.evaluation_share: 0.1`",
        )
