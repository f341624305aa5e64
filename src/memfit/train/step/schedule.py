"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math

from memfit.records.recipe import Optimizer

TIMESCALE = 10_000  # steps of `inverse-sqrt` without a warm-up, as transformers takes them


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """The learning rate of step 0 <= `step` < `steps`.

    As transformers' schedules: rises linearly from 0 in the first step to the full rate in the one
    after the warm-up. Then `constant` stays, `linear`, `polynomial` and `cosine` fall towards the
    floor at `steps`, `inverse-sqrt` falls with the square root of the step (Vaswani et al.
    1706.03762, equation 3), and `wsd` stays, and falls linearly in the last steps (warm-up, stable,
    decay: Hu et al. 2404.06395, section 4), with a warm-up that rises from the floor.
    """
    warmup = settings.warmup(steps)
    if step < warmup:
        start = settings.floor if settings.schedule == "wsd" else 0.0
        return settings.learning_rate * (start + (1.0 - start) * step / warmup)
    shape = _shape(settings, step, steps, warmup)
    return settings.learning_rate * (settings.floor + (1.0 - settings.floor) * shape)


def _shape(settings: Optimizer, step: int, steps: int, warmup: int) -> float:
    """1 at the full rate, 0 at the floor."""
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "inverse-sqrt":
        scale = warmup or TIMESCALE
        return math.sqrt(scale / (step - warmup + scale))
    first = warmup
    if settings.schedule == "wsd":
        first = max(warmup, steps - settings.decay(steps))
    progress = max(0.0, (step - first) / max(1, steps - first))
    if settings.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return float((1.0 - progress) ** (settings.power or 1.0))
