"""A loss or a gradient norm that is not finite: the run stops, or skips the step where it may.

`run.skip_non_finite` is how many steps in turn may be skipped. A step whose gradient norm is not
finite then updates nothing, and neither weights nor optimizer states change; the schedule goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.habits import RunRequest
from memfit.records.recipe import Recipe

KEY = "run.skip_non_finite"
MOST_NAMED = 20  # skipped steps that a run warns of; log.jsonl has all


def check_skips(recipe: Recipe, run: RunRequest) -> None:
    """Raise InvalidRequest, before the first step, where no step can be skipped."""
    stated = f"`{KEY}: {run.skip_non_finite}`"
    if not run.skip_non_finite:
        return
    if recipe.samples:
        raise InvalidRequest(
            f"{stated} under `objective: {recipe.objective}`: an iteration is more than a step",
            hint=f"leave out `{KEY}`: a loss that is not finite ends the run",
        )
    if not recipe.optimizer.clip_norm:
        raise InvalidRequest(
            f"{stated} looks at the gradient norm, and `optimizer.clip_norm: 0` computes none",
            hint="set `optimizer.clip_norm`, such as 1.0; one of 1e9 clips nothing",
        )


@dataclass(slots=True)
class NonFinite:
    """Judges each step's loss and gradient norm; allowed: steps in turn that may be skipped."""

    allowed: int = 0
    in_turn: int = 0
    named: int = 0
    warning: str = ""  # of the last step judged

    def judge(
        self, loss: float, norm: Tensor | None, step: int, *, skipped: bool, scaled: bool
    ) -> tuple[float | None, float | None]:
        """The loss and the norm as they are logged, None where they say nothing; waits for the
        device. skipped: the step updated nothing; scaled: its loss was, which overflows at times.

        Raises RunFailed for one that is not finite, unless the step was skipped and may be.
        """
        found = None if norm is None else float(norm)
        losing = not math.isfinite(loss)
        steep = found is not None and not math.isfinite(found)
        self.warning = ""
        if not losing and (not steep or (skipped and scaled)):
            self.in_turn = 0
            return loss, None if skipped else found
        self.in_turn += 1
        if skipped and self.in_turn <= self.allowed:
            self.named += 1
            last = "; log.jsonl alone names further ones" if self.named == MOST_NAMED else ""
            if self.named <= MOST_NAMED:
                why = f"its loss is {loss} and its gradient norm {found}{last}"
                self.warning = f"step {step} updated nothing: {why}"
            return None if losing else loss, None
        name, value = ("loss", loss) if losing else ("gradient norm", found)
        more = f" after {self.in_turn - 1} skipped in turn, which are all that `{KEY}` allows"
        raise RunFailed(
            f"the {name} of step {step} is {value}{more if self.in_turn > 1 else ''}",
            hint="what is saved is from before; lower `optimizer.learning_rate`, use `precision:"
            f" fp32`, or let the run skip a few such steps: `--set {KEY}=3`",
        )


def check_figures(row: Mapping[str, Any]) -> None:
    """Raise RunFailed for a figure of a line of the log that is not finite: an evaluation's."""
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RunFailed(
                f"the {name.replace('_', ' ')} of step {row['step']} is {value}",
                hint="what is saved is from before; lower `optimizer.learning_rate`, or use"
                " `precision: fp32`",
            )


@torch.no_grad()
def find_broken(model: nn.Module) -> str:
    """The first trainable parameter of this rank that holds a number that is not finite."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.numel() and not math.isfinite(float(torch.linalg.vector_norm(local, math.inf))):
            return name
    return ""
