"""A predicted step's seconds as a Chrome trace: a row a stream, a slice a piece of work.

Of a pipeline, beside them, a row a rank: its schedule simulated with the same seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from memfit.errors import InvalidRequest
from memfit.nouns import write_atomically
from memfit.plan.clock.orders import Schedule, find_schedule
from memfit.plan.clock.pipeline import count_sends
from memfit.plan.clock.schedules import StageTimes, simulate
from memfit.results import Plan

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
    if plan.recipe.parallel.pp == 1:
        return
    schedule = find_schedule(plan.recipe)
    if 2 * schedule.stages * schedule.micro_batches > MOST:
        name = f"{schedule.kind}: more than {MOST:,} pieces, not drawn"
        yield _meta(2, 0, "process_name", {"name": name})
        return
    name = f"{schedule.kind} on {schedule.ranks} ranks, stages alike but for the last one's head"
    yield _meta(2, 0, "process_name", {"name": name})
    for rank, pieces in enumerate(simulate(schedule, _stage_times(plan, schedule)).ranks):
        yield _meta(2, rank, "thread_name", {"name": f"rank {rank}"})
        for piece, start, end in pieces:
            chunk = f", chunk {piece.stage // schedule.ranks}" if schedule.chunks > 1 else ""
            yield {
                "ph": "X", "pid": 2, "tid": rank, "ts": start * MICRO, "dur": (end - start) * MICRO,
                "name": f"{PASSES[piece.pass_]} {piece.micro_batch}{chunk}",
            }  # fmt: skip


def _stage_times(plan: Plan, schedule: Schedule) -> StageTimes:
    """Seconds of one micro-batch and chunk, out of those of the longest stage.

    What is known of both ways together counts half each way, and half of the backward is that of
    the weights.
    """
    seconds = dict.fromkeys(("forward", "backward", "repeated", "head", "tensor", "waiting"), 0.0)
    seconds |= {"sending": 0.0} | {span.op: span.duration for span in plan.timeline.spans}
    pieces = schedule.micro_batches * schedule.chunks
    ways = (seconds["tensor"] + seconds["waiting"]) / 2
    forward = [(seconds["forward"] + ways) / pieces] * schedule.stages
    backward = [(seconds["backward"] / 2 + seconds["repeated"] + ways) / pieces] * schedule.stages
    weight = [seconds["backward"] / 2 / pieces] * schedule.stages
    backward[-1] += seconds["head"] / schedule.micro_batches
    sends = count_sends(schedule.ranks, schedule.chunks, schedule.micro_batches)
    return StageTimes(forward, backward, weight, seconds["sending"] / sends)
