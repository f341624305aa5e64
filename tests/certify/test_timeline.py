"""The timeline's three files: no peak of the tape is lost, and other programs read them."""

from __future__ import annotations

import json
import pickle
import re
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tiny_steps import CPU, H100, make_recipe

from memfit.allocator.tape import Event
from memfit.certify.evidence.certificate import make_certificate
from memfit.certify.evidence.recording import Recording, read_recording
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.records.ledger import Phase
from memfit.records.results import Tensor
from memfit.report import timeline_files
from memfit.report.curve import AROUND, STRETCHES, draw_curve, walk
from memfit.report.page.timeline import _ticks, render_timeline


@pytest.fixture(scope="module", params=[CPU, H100], ids=lambda d: d.id)
def made(request, tmp_path_factory):
    """(certificate, recording) of a tiny step with two micro-batches."""
    file = tmp_path_factory.mktemp("tape") / "recording"
    recipe = make_recipe(accumulation=2, attention="math")
    certificate = make_certificate(recipe, request.param, 8 * GIB, None, tape=file)
    return certificate, read_recording(file)


def test_the_curve_reaches_the_certificates_numbers(made) -> None:
    certificate, recording = made
    curve = draw_curve(recording)
    memory = certificate.memory
    assert curve.peak.phase == memory.peak_phase
    assert sum(curve.peak.kinds) == memory.peak_allocated
    reserved = [p.reserved for p in curve.points]
    if memory.peak_reserved is None:
        assert set(reserved) == {None}
    else:
        assert max(reserved) == memory.peak_reserved
    allocated = [state.allocated for state in walk(recording)]
    highest: dict[str, int] = {}
    pairs = pairwise((0, *recording.marks, len(recording.events)))
    for phase, (start, stop) in zip(recording.stretches, pairs, strict=True):
        held = max(allocated[max(start - 1, 0) : stop])  # what is alive as it begins counts too
        highest[phase] = max(highest.get(phase, 0), held)
    of_another_process = {"generate"}
    assert highest == {p: n for p, n in certificate.phases.items() if p not in of_another_process}
    at_peak = {kind: n for kind, n in zip(curve.kinds, curve.peak.kinds, strict=True) if n}
    at_peak.pop("fragmentation", None)
    rows = certificate.at_peak
    assert at_peak == {k: sum(t.total for t in rows if t.kind == k) for k in {t.kind for t in rows}}


def test_each_streams_bytes_are_told(made) -> None:
    """A CPU has no streams; one GPU computes on one, and what ranks exchange has its own."""
    _, recording = made
    curve = draw_curve(recording)
    if recording.settings is None:
        assert curve.streams == ()
        return
    assert [stream.number for stream in curve.streams] == [0]
    assert all(sum(p.streams) == p.total for p in curve.points)
    some = next(i for i, event in enumerate(recording.events) if event.nbytes > 0)
    tensor = recording.events[some].tensor
    moved = tuple(e._replace(stream=7) if e.tensor == tensor else e for e in recording.events)
    curve = draw_curve(replace(recording, events=moved))
    kind = recording.tensors[tensor].kind
    assert curve.streams[1] == (7, (kind,))
    assert all(sum(p.streams) == p.total for p in curve.points)
    assert max(p.streams[1] for p in curve.points) == recording.tensors[tensor].nbytes


def test_thinning_keeps_the_highest_event_of_every_stretch() -> None:
    """A peak of one event among 90,000 others, and each stretch's own summit."""
    events = []
    tensors = {}
    for number in range(45_000):
        size = 10**6 if number == 31_234 else 1 + number * 7919 % 1000
        tensors[number] = Tensor(nbytes=size, kind="temporary", module="", op="mm")
        events += [Event(number, size), Event(number, 0)]
    recording = Recording(
        events=tuple(events), marks=(20_001,), stretches=(Phase.LOAD, Phase.FORWARD),
        tensors=tensors, settings=None,
    )  # fmt: skip
    totals = [state.tensors for state in walk(recording)]
    curve = draw_curve(recording)
    assert len(curve.points) <= 2 * STRETCHES + 2 * AROUND + 5
    assert (curve.peak.event, curve.peak.total) == (62_468, 10**6)
    near = range(62_468 - AROUND, 62_468 + AROUND + 1)
    assert set(near) <= {p.event for p in curve.points}  # all of it can be zoomed into
    drawn = {p.event: p.total for p in curve.points}
    size = -(-len(events) // STRETCHES)
    for start in range(0, len(events), size):
        stretch = range(start, min(start + size, len(events)))
        kept = [drawn[i] for i in stretch if i in drawn]
        assert max(kept) == max(totals[i] for i in stretch)
        assert min(kept) == min(totals[i] for i in stretch)
    assert curve.stretches == [("load", 0, 20_001), ("forward", 20_001, 90_000)]


def test_thinning_keeps_the_highest_of_each_stream_and_of_what_is_reserved(made) -> None:
    """A stream's only tensor may live for one event, which is no summit of the whole."""
    _, recording = made
    if recording.settings is None:
        return
    first = recording.events[0]
    busy = [Event(10**6 + n // 2, 8192 * (1 - n % 2), 0) for n in range(40_000)]
    spike = [Event(10**7, 4096, 9), Event(10**7, 0, 9)]
    events = (first, *busy[:20_002], *spike, *busy[20_002:])
    made_up = Tensor(nbytes=8192, kind="temporary", module="", op="mm")
    tensors = {first.tensor: recording.tensors[first.tensor], 10**7: replace(made_up, nbytes=4096)}
    tensors |= {event.tensor: made_up for event in busy}
    curve = draw_curve(replace(
        recording, events=events, tensors=tensors, marks=(), stretches=(Phase.FORWARD,),
    ))  # fmt: skip
    at = [stream.number for stream in curve.streams].index(9)
    assert max(p.streams[at] for p in curve.points) == 4096


def test_the_page_stands_alone_and_escapes_what_it_shows(made) -> None:
    certificate, recording = made
    hostile = {
        n: Tensor(nbytes=t.nbytes, kind=t.kind, module="</script><b>", op=t.op, source="<i>:1")
        for n, t in recording.tensors.items()
    }
    page = render_timeline(
        draw_curve(Recording(
            events=recording.events, marks=recording.marks, stretches=recording.stretches,
            tensors=hostile, settings=recording.settings,
        )),
        certificate,
    )  # fmt: skip
    assert "</script><b>" not in page
    assert "<i>" not in page
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert "default-src 'none'" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["points"][data["peak"]][1] == max(p[1] for p in data["points"])
    assert page.count("<polygon") == len(data["kinds"])


def test_the_trace_ends_with_what_is_alive_and_marks_the_peak(made) -> None:
    certificate, recording = made
    trace = json.loads(json.dumps(timeline_files.chrome_trace(recording, certificate)))
    last, highest = {}, {}
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            last[event["name"]] = event["args"]["bytes"]
            highest[event["name"]] = max(highest.get(event["name"], 0), event["args"]["bytes"])
    memory = certificate.memory
    assert highest["allocated"] == memory.peak_allocated
    assert highest.get("reserved") == memory.peak_reserved
    *_, final = walk(recording)
    assert {k: n for k, n in last.items() if k not in ("allocated", "reserved")} == final.by_kind
    (peak,) = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert peak["args"]["allocated"] == memory.peak_allocated
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] for e in slices) == len(recording.events)
    assert [e["ts"] for e in slices] == [0, *recording.marks]


def test_pytorchs_own_viewer_reads_the_snapshot_with_its_lines(made, tmp_path) -> None:
    from torch.cuda import _memory_viz

    certificate, recording = made
    written = timeline_files.write_timeline(recording, certificate, tmp_path)
    names = [path.name for path in written]
    if certificate.memory.peak_reserved is None:
        assert names == ["timeline.html", "timeline.trace.json"]
        return
    assert names[-1] == "timeline.snapshot.pickle"
    assert written[-1].read_bytes()[:2] == b"\x80\x04"  # the newest that the viewer reads
    snapshot = pickle.loads(written[-1].read_bytes())
    assert "<html" in _memory_viz.trace_plot(snapshot)
    frames = {
        (frame["filename"], frame["name"])
        for entry in snapshot["device_traces"][0] for frame in entry["frames"]
    }  # fmt: skip
    assert any(file.startswith("transformers/models/llama") for file, _ in frames)
    assert ("model.layers.0.mlp.gate_proj.weight", "parameters") in frames
    taken = sum(e["size"] for e in snapshot["device_traces"][0] if e["action"] == "segment_alloc")
    assert taken >= certificate.memory.peak_reserved


def test_a_folder_that_cannot_be_written_is_refused_and_nothing_is_left(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write in") as caught:
        timeline_files.check_writable(tmp_path / "file" / "run")
    assert caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    timeline_files.check_writable(tmp_path / "run" / "first")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_nothing_is_written_where_one_file_cannot_be_made(made, tmp_path, monkeypatch) -> None:
    def fail(*_):
        raise ZeroDivisionError

    certificate, recording = made
    monkeypatch.setattr(timeline_files, "chrome_trace", fail)
    with pytest.raises(ZeroDivisionError):
        timeline_files.write_timeline(recording, certificate, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("top", [1, 7, 900, 5000, 3.2e6, 5e8, 84 * GIB, 560 * GIB])
def test_ticks_are_few_round_and_within_the_axis(top) -> None:
    ticks = _ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] <= top
    assert len(ticks) <= 11
    assert len(set(ticks)) >= min(3, top)
