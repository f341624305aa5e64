"""The Chrome trace of a predicted step: it loads, and nothing overlaps on a stream."""

import json
from itertools import pairwise

import msgspec
import pytest
from click.testing import CliRunner

from memfit import api
from memfit.cli.app import app
from memfit.core.errors import InvalidRequest
from memfit.records.request import Request
from memfit.records.timeline import Span, Timeline
from memfit.report.pipeline_strip import draw_strip
from memfit.report.step_trace import write_step_trace

PLANNED = ["predict", "llama-3.1-8b", "--device", "h100-sxm", "--set", "method=lora"]
STATED = [
    "precision=bf16", "micro_batch=1", "task.global_batch=8", "task.sequence_length=2048",
    "recompute=full", "loss=plain", "attention=flash", "optimizer.name=adamw", "base_format=bf16",
]  # fmt: skip


def read_trace(path):
    """Threads' names, and the slices of each in order."""
    events = json.loads(path.read_text())["traceEvents"]
    events = [e for e in events if e["pid"] == 1]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            slices[names[event["tid"]]].append(event)
    return slices


def check(slices, seconds):
    for on_stream in slices.values():
        for before, after in pairwise(sorted(on_stream, key=lambda e: e["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-9)
    last = max(e["ts"] + e["dur"] for on_stream in slices.values() for e in on_stream)
    assert last == pytest.approx(seconds * 1e6)


def test_a_predicted_step_is_written_beside_its_plan(tmp_path):
    words = [word for stated in STATED for word in ("--set", stated)]
    asked = [*PLANNED, *words, "--timeline", "--folder", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    slices = read_trace(tmp_path / "step.trace.json")
    check(slices, plan["time"]["step_seconds"])
    assert sum(map(len, slices.values())) == len(plan["timeline"]["spans"]) > 2
    for on_stream in slices.values():
        assert all(event["args"]["because"] for event in on_stream)


@pytest.fixture
def plan():
    request = msgspec.convert({"model": "gpt2", "hardware": {"device": "h100-sxm"}}, Request)
    return api.plan(request, levers=False)


def test_streams_run_side_by_side(plan, tmp_path):
    def span(stream, start, duration):
        return Span(
            op="work", stream=stream, start=start, duration=duration, flop=0.0, because="told"
        )

    made = Timeline(spans=(span("dp", 1.0, 2.0), span("compute", 0.0, 2.0), span("dp", 3.0, 1.0)))
    assert made.streams == ("compute", "dp")
    path = write_step_trace(msgspec.structs.replace(plan, timeline=made), tmp_path)
    slices = read_trace(path)
    assert [(e["ts"], e["dur"]) for e in slices["dp"]] == [(1e6, 2e6), (3e6, 1e6)]
    check(slices, 4.0)
    overlapping = {"dp": [*slices["dp"], {"ts": 1.5e6, "dur": 2e6}]}
    with pytest.raises(AssertionError):
        check(overlapping, 4.0)


PIPELINE = {
    "model": "llama-3.1-8b", "framework": "megatron", "micro_batch": 1, "recompute": "none",
    "precision": "bf16-mixed", "task": {"sequence_length": 4096, "global_batch": 32},
    "hardware": {"device": "h100-sxm", "count": 8}, "parallel": {"pp": 4, "tp": 2},
}  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipelines_ranks_are_drawn_and_take_what_the_step_says(tmp_path, chunks):
    asked = PIPELINE | {"parallel": PIPELINE["parallel"] | {"virtual_pp": chunks}}
    made = api.predict(msgspec.convert(asked, Request))
    events = json.loads(write_step_trace(made, tmp_path).read_text())["traceEvents"]
    drawn = [e for e in events if e["pid"] == 2 and e["ph"] == "X"]
    assert len(drawn) == 4 * 32 * 2 * chunks
    last = max(e["ts"] + e["dur"] for e in drawn)
    spans = {span.op: span.duration for span in made.timeline.spans}
    beside = ("gathering", "reducing", "updating", "straggling", "fixed")
    within = sum(seconds for op, seconds in spans.items() if op not in beside)
    # messages are counted as between stages alike; the head's stage hides some of them
    assert last == pytest.approx(within * 1e6, rel=0.005)
    assert last <= within * 1e6 * (1 + 1e-9)
    for rank in range(4):
        mine = sorted((e for e in drawn if e["tid"] == rank), key=lambda e: e["ts"])
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_a_page_draws_the_same_pieces_and_says_what_it_does_not_draw(plan):
    asked = PIPELINE | {"parallel": PIPELINE["parallel"] | {"virtual_pp": 2}}
    made = api.predict(msgspec.convert(asked, Request))
    strip = api.draw_pipeline(made)
    assert (strip.kind, strip.micro_batches, strip.chunks) == ("interleaved", 32, 2)
    assert strip.pieces == sum(map(len, strip.ranks)) == 4 * 32 * 2 * 2
    for slots in strip.ranks:  # each pass of each micro-batch and chunk once
        assert len({slot[:3] for slot in slots}) == len(slots)
    assert strip.seconds == max(slot.end for slots in strip.ranks for slot in slots)
    few = draw_strip(made, strip.pieces - 1)
    assert (few.ranks, few.seconds) == ((), None)
    assert few.because == "more than 511 pieces, not drawn"
    unknown = msgspec.structs.replace(made, timeline=Timeline(spans=()))
    assert draw_strip(unknown, strip.pieces).because == made.time.because
    assert api.draw_pipeline(plan) is None


def test_what_has_no_time_has_no_trace(plan, tmp_path):
    unknown = msgspec.structs.replace(plan, timeline=Timeline(spans=()))
    with pytest.raises(InvalidRequest, match="no timeline to draw"):
        write_step_trace(unknown, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_timeline_needs_a_folder():
    done = CliRunner().invoke(app, [*PLANNED, "--timeline"])
    assert isinstance(done.exception, InvalidRequest)
    assert "no folder is named" in str(done.exception)
