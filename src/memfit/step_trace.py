"""A predicted step's seconds as a Chrome trace: a row a stream, a slice a piece of work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from memfit.errors import InvalidRequest
from memfit.nouns import write_atomically
from memfit.results import Plan

STEP_TRACE = "step.trace.json"
MICRO = 1e6  # of a second


def write_step_trace(plan: Plan, folder: Path) -> Path:
    """Write step.trace.json, for ui.perfetto.dev or chrome://tracing.

    Raises InvalidRequest where the plan knows no time; nothing is written then.
    """
    if not plan.timeline.spans:
        raise InvalidRequest(
            f"there is no timeline to draw: {plan.time.because}",
            hint="`memfit devices` shows whose speed is known",
        )
    path = folder / STEP_TRACE
    write_atomically(path, msgspec.json.encode(trace_step(plan)))
    return path


def trace_step(plan: Plan) -> dict[str, Any]:
    """One process, a thread a stream in the order in which they begin; microseconds."""
    return {
        "traceEvents": [*_names(plan), *_slices(plan)],
        "displayTimeUnit": "ms",
        "otherData": {
            "recipe": plan.recipe_digest,
            "device": plan.recipe.device,
            "time": plan.time.because,
            "versions": plan.versions,
        },
    }


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    yield _meta(0, "process_name", {"name": f"one rank's step of {plan.recipe.model.name}"})
    for thread, stream in enumerate(plan.timeline.streams, start=1):
        yield _meta(thread, "thread_name", {"name": stream})
        yield _meta(thread, "thread_sort_index", {"sort_index": thread})


def _meta(thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": name, "args": args}


def _slices(plan: Plan) -> Iterator[dict[str, Any]]:
    threads = {stream: i for i, stream in enumerate(plan.timeline.streams, start=1)}
    for span in plan.timeline.spans:
        yield {
            "ph": "X", "pid": 1, "tid": threads[span.stream], "name": span.op,
            "ts": span.start * MICRO, "dur": span.duration * MICRO,
            "args": {"because": span.because} | ({"FLOP": span.flop} if span.flop else {}),
        }  # fmt: skip
