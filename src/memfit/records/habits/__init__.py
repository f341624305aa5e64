"""`run` of a request: how often a run is evaluated and saved, what it keeps, and when it stops.

No byte of a step depends on it, so that it is no part of a recipe, and may change when a run goes
on in its folder.
"""

from __future__ import annotations

import math
from typing import Literal

from memfit.core.errors import InvalidRequest
from memfit.core.kinds_of_numbers import NotNegative, NotNegativeFloat, Positive
from memfit.records import Record

Best = Literal["auto", "most", "least"]

PARTS = 10  # a run is saved and evaluated this often, unless it is stated


class RunRequest(Record, frozen=True, kw_only=True):
    """How a run goes on around its steps."""

    save_every: NotNegativeFloat = 0.0  # steps; below 1 a share of the run; 0: a tenth
    evaluate_every: NotNegativeFloat = 0.0  # the same
    evaluate_tokens: NotNegative = 0  # held-out tokens of each; 0: what a twentieth of the time is
    keep: Positive = 2  # newest checkpoints
    best_by: str = ""  # the model with the best held-out `loss`, … is what the run ends with
    best_is: Best = "auto"  # whether more of it is better; auto: unless its name ends in `loss`
    patience: NotNegative = 0  # evaluations in turn that are no better, after which it stops
    min_improvement: NotNegativeFloat = 0.0  # that counts as better
    skip_non_finite: NotNegative = 0  # steps in turn without a finite gradient norm; 0: it stops
    metrics: tuple[str, ...] = ()  # functions of evaluations: FILE.py:NAME, or of a package
    samples: NotNegative = 0  # held-out prompts that are answered at evaluations
    sample_every: Positive = 1  # evaluations
    sample_tokens: Positive = 64  # of each answer, at most
    callbacks: tuple[str, ...] = ()  # FILE.py:NAME, or what an installed package registers
    trackers: tuple[str, ...] = ()  # of accelerate: tensorboard, wandb, mlflow, trackio, …

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a number of steps that is none, or a key without an effect."""
        for name in ("save_every", "evaluate_every"):
            value = getattr(self, name)
            if value > 1 and value != int(value):
                raise InvalidRequest(
                    f"`run.{name}: {value}` is no number of steps",
                    hint="write whole steps, or a share of the run below 1, such as 0.1",
                )
        if self.patience and not self.best_by:
            raise InvalidRequest(
                f"`run.patience: {self.patience}` is set, and `run.best_by` does not say by what"
                " an evaluation is better",
                hint="add `run.best_by: loss`",
            )
        if self.best_is != "auto" and not self.best_by:
            raise InvalidRequest(
                f"`run.best_is: {self.best_is}` is set, and `run.best_by` does not say of what",
                hint="add `run.best_by`, such as one of `run.metrics`' figures",
            )
        if self.min_improvement and not self.patience:
            raise InvalidRequest(
                f"`run.min_improvement: {self.min_improvement}` has an effect on `run.patience`"
                " alone, which is 0",
                hint="add `run.patience: 3`, or leave it out",
            )

    @property
    def rises(self) -> bool:
        """Whether more is better of what is compared; unless stated as transformers takes it."""
        if self.best_is == "auto":
            return not self.best_by.endswith("loss")
        return self.best_is == "most"


def count_every(stated: float, steps: int) -> int:
    """Steps between two of what happens so often; a share is rounded up, as in transformers."""
    if not stated:
        return max(1, steps // PARTS)
    return math.ceil(stated * steps) if stated < 1 else int(stated)
