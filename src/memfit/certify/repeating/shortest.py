"""A trace of few blocks where that gives the whole model's tape, and of all blocks where not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memfit.certify.repeating.alike import Unlike
from memfit.certify.repeating.live import RepeatingRecorder
from memfit.certify.tracing.recorder import Recorder, Trace, make_recorder
from memfit.core.errors import NotCertified
from memfit.records.hardware import Device
from memfit.records.recipe import Recipe


def trace_shortest(
    trace: Callable[[Recorder], Trace], recipe: Recipe, device: Device, *, full: bool
) -> Trace:
    """The same trace by either way; its bounds say when blocks were left out.

    trace: runs the step under a recorder, from the start. full: leave no block out.
    Raises NotCertified and InvalidRequest as `trace` does.
    """
    whole = make_recorder(Recorder, device)
    if full or not may_repeat(recipe):
        return trace(whole)
    try:
        return trace(make_recorder(RepeatingRecorder, device))
    except Unlike as why:
        found = trace(whole)
        return dataclasses.replace(found, bounds=(*found.bounds, f"all blocks traced: {why}"))
    except NotCertified:  # of few blocks, or of all of them
        return trace(whole)


def may_repeat(recipe: Recipe) -> bool:
    """Whether the recipe's step keeps to a block at a time on one stream.

    An update within backward and copies to the host mix blocks with what is outside of them; ranks
    gather the next block's weights during one.
    """
    return (
        recipe.parallel.world == 1
        and recipe.offload == "none"
        and recipe.compile == "none"
        and not recipe.optimizer.in_backward
    )
