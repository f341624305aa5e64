"""A predicted step's seconds as a Chrome trace: a row a stream, a slice a piece of work.

Of a pipeline, beside them, a row a rank: its schedule simulated with the same seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from memfit.core.errors import InvalidRequest
from memfit.records import write_atomically
from memfit.records.results import Plan
from memfit.report.pipeline_strip import draw_strip

STEP_TRACE = "step.trace.json"
MICRO = 1e6  # of a second
MOST = 100_000  # pieces of a pipeline that are drawn: viewers are slow beyond
PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


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
        "traceEvents": [*_names(plan), *_slices(plan), *_pipeline(plan)],
        "displayTimeUnit": "ms",
        "otherData": {
            "recipe": plan.recipe_digest,
            "device": plan.recipe.device,
            "time": plan.time.because,
            "versions": plan.versions,
        },
    }


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    yield _meta(1, 0, "process_name", {"name": f"one rank's step of {plan.recipe.model.name}"})
    for thread, stream in enumerate(plan.timeline.streams, start=1):
        yield _meta(1, thread, "thread_name", {"name": stream})
        yield _meta(1, thread, "thread_sort_index", {"sort_index": thread})


def _meta(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}


def _slices(plan: Plan) -> Iterator[dict[str, Any]]:
    threads = {stream: i for i, stream in enumerate(plan.timeline.streams, start=1)}
    for span in plan.timeline.spans:
        yield {
            "ph": "X", "pid": 1, "tid": threads[span.stream], "name": span.op,
            "ts": span.start * MICRO, "dur": span.duration * MICRO,
            "args": {"because": span.because} | ({"FLOP": span.flop} if span.flop else {}),
        }  # fmt: skip


def _pipeline(plan: Plan) -> Iterator[dict[str, Any]]:
    """Every rank's pieces, one micro-batch and chunk each; nothing without a pipeline."""
    strip = draw_strip(plan, MOST)
    if strip is None:
        return
    ranks = f" on {plan.recipe.parallel.pp} ranks, " if strip.ranks else ": "
    yield _meta(2, 0, "process_name", {"name": f"{strip.kind}{ranks}{strip.because}"})
    for rank, slots in enumerate(strip.ranks):
        yield _meta(2, rank, "thread_name", {"name": f"rank {rank}"})
        for slot in slots:
            chunk = f", chunk {slot.chunk}" if strip.chunks > 1 else ""
            yield {
                "ph": "X", "pid": 2, "tid": rank, "ts": slot.start * MICRO,
                "dur": (slot.end - slot.start) * MICRO,
                "name": f"{PASSES[slot.pass_]} {slot.micro_batch}{chunk}",
            }  # fmt: skip
