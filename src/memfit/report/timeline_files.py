"""The files of `memfit certify --timeline`: a page, a Chrome trace, a snapshot of the allocator."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from memfit.allocator.tape import Frame
from memfit.certify.evidence.recording import Recording
from memfit.certify.evidence.snapshot import write_snapshot
from memfit.core.errors import InvalidRequest
from memfit.core.wording import PHASES
from memfit.records import write_atomically
from memfit.records.results import Certificate
from memfit.report.curve import draw_curve, name_of, walk
from memfit.report.page.timeline import render_timeline

PAGE, TRACE, SNAPSHOT = "timeline.html", "timeline.trace.json", "timeline.snapshot.pickle"


def check_writable(folder: Path) -> None:
    """Raise InvalidRequest where nothing could be written; nothing is left there, not even it."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"cannot write in `{folder}`: {error.strerror}",
            hint="name another folder with `--folder`",
        ) from None


def write_timeline(recording: Recording, certificate: Certificate, folder: Path) -> list[Path]:
    """Write all the files there are for the device; nothing unless all could be made.

    A CPU has no caching allocator, so that there is no snapshot of one.
    """
    made = {
        PAGE: render_timeline(draw_curve(recording), certificate).encode(),
        TRACE: msgspec.json.encode(chrome_trace(recording, certificate)),
    }
    if recording.settings is not None:
        made[SNAPSHOT] = pickle.dumps(snapshot(recording), protocol=4)  # the viewer's newest
    for name, content in made.items():
        write_atomically(folder / name, content)
    return [folder / name for name in made]


def snapshot(recording: Recording) -> dict[str, Any]:
    """As `torch.cuda.memory._snapshot()` gives it, for pytorch.org/memory_viz."""
    assert recording.settings is not None

    def frames(number: int) -> Sequence[Frame]:
        tensor = recording.tensors[number]
        file, _, line = tensor.source.rpartition(":")
        place = Frame(filename=tensor.module or "(outside any module)", line=0, name=tensor.kind)
        caller = Frame(filename=file or "(unknown)", line=int(line or 0), name=name_of(tensor))
        return caller, place

    return write_snapshot(
        recording.events,
        recording.settings,
        frames=frames,
        marks=recording.marks,
        phases=[PHASES.get(phase, phase) for phase in recording.stretches],
    )


def chrome_trace(recording: Recording, certificate: Certificate) -> dict[str, Any]:
    """For ui.perfetto.dev or chrome://tracing: a counter a kind, a slice a phase, the peak.

    The clock counts events: a microsecond each.
    """
    return {
        "traceEvents": [*_names(), *_slices(recording), *_counters(recording)],
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "one microsecond an allocation or release: order, not time",
            "recipe": certificate.recipe_digest,
            "device": certificate.device,
            **certificate.versions,
        },
    }


def _names() -> Iterator[dict[str, Any]]:
    for thread, name in ((0, "memfit certify"), (1, "phases")):
        what = "thread_name" if thread else "process_name"
        yield {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


def _slices(recording: Recording) -> Iterator[dict[str, Any]]:
    marks = pairwise((0, *recording.marks, len(recording.events)))
    for phase, (start, stop) in zip(recording.stretches, marks, strict=True):
        name = PHASES.get(phase, phase)
        yield {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": start, "dur": stop - start}


def _counters(recording: Recording) -> Iterator[dict[str, Any]]:
    """What an event changed; the allocator's counters where they move."""
    last: dict[str, int] = {}
    highest, top = -1, 0
    for index, state in enumerate(walk(recording)):
        now = {**state.by_kind, "allocated": state.allocated}
        if state.reserved is not None:
            now["reserved"] = state.reserved
        for name, nbytes in now.items():
            if last.get(name) != nbytes:
                last[name] = nbytes
                args = {"bytes": nbytes}
                yield {"ph": "C", "pid": 1, "name": name, "ts": index, "args": args}
        if state.allocated > highest:
            highest, top = state.allocated, index
    args = {"allocated": highest}
    yield {"ph": "i", "pid": 1, "tid": 1, "s": "g", "name": "peak", "ts": top, "args": args}
