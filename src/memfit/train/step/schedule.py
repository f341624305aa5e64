"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math

from memfit.records.recipe import Optimizer


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """The learning rate of step 0 <= `step` < `steps`.

    As transformers' schedules: rises linearly from 0 in the first step to the full rate in the one
    after `warmup_steps`; then stays, falls linearly, or follows half a cosine, towards 0 at
    `steps`.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if settings.schedule == "constant":
        factor = 1.0
    elif settings.schedule == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * factor
