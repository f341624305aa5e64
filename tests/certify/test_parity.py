"""The replay against what torch did on real GPUs, entry by entry, and against its own snapshots."""

from __future__ import annotations

import copy
import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as testing
from hypothesis import strategies as st
from msgspec.structs import replace
from tapes import configurations, requests, tape_of

from memfit.allocator.caching import OutOfMemory, follow, replay
from memfit.allocator.settings import UNLIMITED, Settings
from memfit.allocator.tape import CAUGHT_UP, EMPTIED, FREED, USED, Event, Frame
from memfit.certify.evidence.snapshot import RecordingAllocator, nowhere, write_snapshot
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB, MIB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from parity import check_recording, read_snapshot

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json.gz"))
SIZES = {"from_the_start": 97, "inference": 4998, "training": 22332}


def load(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.name.partition(".")[0])
def test_the_replay_does_what_torch_did_on_a_gpu(path: Path) -> None:
    """Every address of every block, every segment taken, and every block at the end."""
    snapshot = load(path)
    parity = check_recording(read_snapshot(snapshot))
    assert parity.divergence is None
    assert parity.entries == SIZES[path.name.partition(".")[0]]
    assert parity.peak_reserved >= sum(s["total_size"] for s in snapshot["segments"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"roundup_power2_divisions": (2,) * 16},
        {"max_split_size": 20 * MIB},
        {"large_segment_size": 24 * MIB},
        {"expandable_segments": True},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_under_other_settings_it_would_have_done_something_else(wrong: dict) -> None:
    recorded = read_snapshot(load(RECORDINGS[0]))
    changed = recorded._replace(settings=replace(recorded.settings, **wrong))
    divergence = check_recording(changed).divergence
    assert divergence is not None
    assert divergence.recorded != divergence.replayed


def test_the_first_difference_is_named_with_its_place_in_python() -> None:
    tape = [Event(0, 30 * MIB), Event(1, 5 * MIB), Event(0, FREED), Event(2, 30 * MIB)]
    place = (Frame("torch.cpp", 1, "empty"), Frame("/home/x/model.py", 7, "forward"))
    snapshot = write_snapshot(tape, Settings(), frames=lambda tensor: place)
    assert check_recording(read_snapshot(snapshot)).divergence is None
    entry = next(e for e in snapshot["device_traces"][0][::-1] if e["action"] == "alloc")
    entry["addr"] += 512
    divergence = check_recording(read_snapshot(snapshot)).divergence
    assert divergence is not None
    assert divergence.entry == 6
    assert divergence.frame == "/home/x/model.py:7 forward"
    assert divergence.recorded == f"alloc of {30 * MIB} B at {entry['addr']:#x} on stream 0"
    assert divergence.replayed == f"alloc of {30 * MIB} B at {entry['addr'] - 512:#x} on stream 0"


def test_a_different_end_is_a_difference_too() -> None:
    snapshot = write_snapshot([Event(0, 5 * MIB)], Settings())
    snapshot["segments"][0]["blocks"][0]["size"] += 512
    divergence = check_recording(read_snapshot(snapshot)).divergence
    assert divergence is not None
    assert "active_allocated" in divergence.recorded


def test_a_delayed_release_is_read_from_when_it_was_completed() -> None:
    tape = [
        Event(0, 30 * MIB), Event(0, USED, 7), Event(0, FREED), Event(1, 30 * MIB),
        Event(-1, CAUGHT_UP, 7), Event(2, 30 * MIB), Event(1, FREED), Event(3, 5 * MIB),
    ]  # fmt: skip
    read = read_snapshot(write_snapshot(tape, Settings()))
    kinds = [event.nbytes for event in read.tape if event.nbytes < 1]
    assert kinds == [USED, FREED, CAUGHT_UP, FREED]
    assert check_recording(read).divergence is None


def test_a_cache_emptied_by_hand_is_one_event() -> None:
    tape = [
        Event(0, 30 * MIB), Event(1, 20 * MIB), Event(0, FREED), Event(1, FREED),
        Event(-1, EMPTIED), Event(2, 40 * MIB),
    ]  # fmt: skip
    read = read_snapshot(write_snapshot(tape, Settings()))
    assert [event.nbytes for event in read.tape].count(EMPTIED) == 1
    assert replay(read.tape, Settings()).peaks == replay(tape, Settings()).peaks


def test_a_failed_allocation_is_tried_and_the_program_goes_on() -> None:
    conf = Settings(capacity=64 * MIB)
    allocator = RecordingAllocator(conf, nowhere)
    follow(allocator, Event(0, 30 * MIB))
    with pytest.raises(OutOfMemory):
        follow(allocator, Event(1, 40 * MIB))
    follow(allocator, Event(0, FREED))
    follow(allocator, Event(2, 40 * MIB))
    snapshot = {
        "segments": list(allocator.describe_segments()),
        "device_traces": [allocator.entries],
    }
    assert check_recording(read_snapshot(snapshot, settings=conf)).divergence is None


@given(requests, configurations)
@testing(max_examples=60)
def test_what_a_replay_writes_it_reads_back_and_replays_alike(drawn: list, conf: Settings) -> None:
    delays = conf.garbage_collection_threshold == 0 and conf.max_split_size == UNLIMITED
    tape = tape_of(drawn, streams=delays)
    read = read_snapshot(write_snapshot(tape, conf), settings=conf)
    parity = check_recording(read)
    assert parity.divergence is None
    again, once = replay(read.tape, conf), replay(tape, conf)
    assert again.peaks == once.peaks
    assert (again.retries, again.segments) == (once.retries, once.segments)


@given(requests, st.integers(1, 60), st.sampled_from([Settings(), Settings(device_memory=GIB)]))
@testing(max_examples=60)
def test_a_recording_may_begin_in_the_middle(drawn: list, skipped: int, conf: Settings) -> None:
    """What was there before is worked back from the rest."""
    tape = [event for event in tape_of(drawn, streams=False) if event.stream == 0]
    snapshot = write_snapshot(tape, conf)
    late = copy.deepcopy(snapshot)
    late["device_traces"][0] = late["device_traces"][0][skipped:]
    if not late["device_traces"][0] or late["device_traces"][0][0]["action"] == "free_completed":
        return
    parity = check_recording(read_snapshot(late))
    assert parity.divergence is None


def test_what_cannot_be_read_is_one_clear_error() -> None:
    with pytest.raises(InvalidRequest, match="no history of device 0"):
        read_snapshot({"segments": [], "device_traces": [[]]})
    unknown = {"action": "teleport", "addr": 1, "size": 1, "stream": 0}
    with pytest.raises(InvalidRequest, match="teleport"):
        read_snapshot({"segments": [], "device_traces": [[unknown]]})
    twice = write_snapshot([Event(0, 1), Event(0, FREED)], Settings())
    twice["device_traces"][0] += twice["device_traces"][0][-2:]
    with pytest.raises(InvalidRequest, match=r"entry 4 releases .* where nothing is live"):
        read_snapshot(twice)
    pages = write_snapshot([Event(0, MIB), Event(1, MIB)], Settings(expandable_segments=True))
    pages["device_traces"][0] = pages["device_traces"][0][1:]
    with pytest.raises(InvalidRequest, match="mapped before the recording began"):
        read_snapshot(pages)
