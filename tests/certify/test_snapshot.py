"""Snapshots of a replay: torch's own viewer functions read them, and they add up."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch.cuda import _memory_viz as viewer

from memfit.allocator.caching import replay
from memfit.allocator.settings import Settings
from memfit.allocator.tape import CAUGHT_UP, FREED, USED, Event, Frame
from memfit.certify.evidence.snapshot import write_snapshot
from memfit.core.units import GIB, MIB

NATIVE = Settings()
EXPANDABLE = Settings(expandable_segments=True, device_memory=GIB)
TAPE = (
    Event(0, 30 * MIB),
    Event(1, 700),
    Event(2, 5 * MIB, 7),
    Event(2, USED, 0),
    Event(0, FREED),
    Event(3, 12 * MIB),
    Event(2, FREED),
    Event(4, 3 * MIB, 7),
)


def where(tensor: int) -> tuple[Frame, ...]:
    return (Frame("model.py", 10 + tensor, "forward"), Frame("train.py", 3, "step"))


def text_of(lines: str) -> str:
    """Stands in for the script that draws a flame graph, which viewers download."""
    return lines


@pytest.mark.parametrize("settings", [NATIVE, EXPANDABLE], ids=["native", "expandable"])
def test_torch_reads_it_and_its_own_sums_agree(settings: Settings) -> None:
    snapshot = write_snapshot(TAPE, settings, frames=where)
    end = replay(TAPE, settings)
    assert sum(s["total_size"] for s in snapshot["segments"]) == end.peaks.reserved
    summary = viewer.segsum(snapshot)  # raises where segments and blocks do not add up
    assert f"total_reserved: {viewer.Bytes(end.peaks.reserved)}\n" in summary
    assert f"segments: {len(snapshot['segments'])}\n" in summary
    told = viewer.trace(snapshot)
    assert told.startswith("Device 0")
    assert "= cudaMalloc(" in told or "segment_map" in told
    assert viewer.memory(snapshot, text_of).count("train.py:3:step;model.py:") == 4
    assert "stream_7;seg_" in viewer.segments(snapshot, text_of)


@pytest.mark.parametrize("kind", [False, True])
def test_the_viewer_page_holds_the_snapshot(kind: bool) -> None:
    snapshot = write_snapshot(TAPE, NATIVE, frames=where, marks=(3,), phases=("load", "forward"))
    page = viewer.trace_plot(snapshot, plot_segments=kind)
    assert "MemoryViz.js" in page
    assert "snapshot.pickle" in page
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


def test_torch_pairs_every_release_with_its_allocation() -> None:
    snapshot = write_snapshot(TAPE, NATIVE)
    left = viewer.filter_alloc_free_pairs(copy.deepcopy(snapshot))["device_traces"][0]
    kept = [e["size"] for e in left if e["action"] == "alloc"]
    assert kept == [700, 12 * MIB, 3 * MIB]


def test_a_block_that_waits_is_neither_live_nor_free() -> None:
    snapshot = write_snapshot(TAPE, NATIVE)
    (segment,) = [s for s in snapshot["segments"] if s["stream"] == 7]
    assert [(b["state"], b["size"] // MIB) for b in segment["blocks"]] == [
        ("active_pending_free", 5), ("active_allocated", 3), ("inactive", 12),
    ]  # fmt: skip
    assert segment["active_size"] == 8 * MIB
    assert segment["allocated_size"] == 3 * MIB
    done = write_snapshot((*TAPE, Event(-1, CAUGHT_UP, 0), Event(5, 1)), NATIVE)
    last = [e["action"] for e in done["device_traces"][0]][-2:]
    assert last == ["free_completed", "alloc"]  # as torch: before it serves a request


def test_segments_come_with_their_addresses_and_never_overlap() -> None:
    for settings in (NATIVE, EXPANDABLE):
        snapshot = write_snapshot(TAPE, settings)
        end = 0
        for segment in snapshot["segments"]:
            assert segment["address"] >= end > -1
            for block in segment["blocks"]:
                assert block["address"] >= end
                end = block["address"] + block["size"]
            assert end == segment["address"] + segment["total_size"]


def test_phases_are_annotations() -> None:
    snapshot = write_snapshot(TAPE, NATIVE, marks=(2, 5), phases=("load", "forward", "backward"))
    told = [(a["name"], a["stage"], a["time_us"]) for a in snapshot["external_annotations"]]
    assert told == [
        ("load", "START", 0), ("load", "END", 2), ("forward", "START", 2), ("forward", "END", 5),
        ("backward", "START", 5), ("backward", "END", 8),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="zip"):
        write_snapshot(TAPE, NATIVE, marks=(2, 5), phases=("load",))


def test_a_tape_that_does_not_fit_ends_with_its_error() -> None:
    snapshot = write_snapshot(TAPE, Settings(capacity=40 * MIB), frames=where)
    last = snapshot["device_traces"][0][-1]
    assert (last["action"], last["size"]) == ("oom", 5 * MIB)
    assert last["device_free"] == 8 * MIB  # 40 - 30 - 2
    assert last["frames"][0] == {"filename": "model.py", "line": 12, "name": "forward"}
    assert "raise OutOfMemoryError # 5.0MiB requested, 8.0MiB free in CUDA" in viewer.trace(
        snapshot
    )


def test_settings_are_written_as_torch_writes_them() -> None:
    settings = Settings(max_split_size=64 * MIB, roundup_power2_divisions=(4,) * 16)
    told = write_snapshot((), settings)["allocator_settings"]
    assert told["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,roundup_power2_divisions:4"
    assert told["roundup_power2_divisions"]["32768"] == 4
    assert write_snapshot((), NATIVE)["allocator_settings"]["max_split_size"] == 2**63 - 1
