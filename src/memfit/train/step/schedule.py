"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math

from memfit.records.recipe import Optimizer


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """The learning rate of step 0 <= `step` < `steps`.

    Rises linearly over `warmup_steps` and reaches the full rate in the last of them (no step is
    wasted on rate 0); then stays, falls linearly, or follows half a cosine, towards 0 at `steps`.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if settings.schedule == "constant":
        factor = 1.0
    elif settings.schedule == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * factor
