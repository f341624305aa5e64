"""Dynamic loss scaling, without which small fp16 gradients would be zero (1710.03740, section 3.2).

The loss is multiplied by a scale before its backward, the gradients are divided by it before they
are clipped, and a step whose gradients are not finite is skipped and halves the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.core.errors import RunFailed
from memfit.records.recipe import Recipe

SMALLEST = 2.0**-10  # a scale below this one says that the gradients overflow whatever it is


def make_scaler(recipe: Recipe, device: torch.device) -> torch.amp.GradScaler | None:
    """The scaler of a recipe that computes in fp16; None for the others."""
    return torch.amp.GradScaler(device.type) if recipe.scaled else None


def current_scale(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """A 0-dim copy of the scale, without waiting for the device."""
    if scaler is None:
        return None
    return scaler.scale(torch.ones((), device=device))


def unscale(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients by the scale, and note whether one is not finite."""
    if scaler is not None:
        scaler.unscale_(optimizer)


def update(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step, unless gradients were not finite, and the next step's scale."""
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def was_skipped(scaler: torch.amp.GradScaler | None, used: Tensor | None, step: int) -> bool:
    """Whether the step with that scale was skipped; waits for the device.

    Raises RunFailed when the scale has collapsed.
    """
    if scaler is None or used is None:
        return False
    now = scaler.get_scale()
    if now < SMALLEST:
        raise RunFailed(
            f"the loss scale has fallen to {now} by step {step}: gradients are not finite in fp16",
            hint="use `precision: bf16-mixed` or `precision: fp32`, or a lower learning rate",
        )
    return now < float(used)
