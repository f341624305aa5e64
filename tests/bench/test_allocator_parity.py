"""bench/allocator_parity.py: its cases, and the path that needs no GPU."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit import api
from memfit.allocator.tape import CAUGHT_UP, EMPTIED, FREED, USED, Event
from memfit.core.errors import InvalidRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import allocator_parity

RECORDINGS = Path(__file__).resolve().parents[1] / "certify" / "recordings"


def test_the_self_test_compares_every_kind_of_entry(tmp_path: Path, capsys) -> None:
    out = tmp_path / "parity.json"
    assert allocator_parity.main(["--self-test", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "DIFFERS" not in said
    rows = json.loads(out.read_text())["rows"]
    assert all(row["divergence"] is None for row in rows)
    assert {kind for row in rows for kind in row["kinds"]} == {
        "alloc", "free_completed", "free_requested", "oom", "segment_alloc", "segment_free",
        "segment_map", "segment_unmap",
    }  # fmt: skip
    assert max(row["streams"] for row in rows) == 2


def test_a_difference_is_said_and_fails(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    real = allocator_parity.imitate

    def wrong(case: Any) -> dict:
        made = real(case)
        made["device_traces"][0].pop()
        return made

    monkeypatch.setattr(allocator_parity, "imitate", wrong)
    assert allocator_parity.main(["--self-test"]) == 1
    assert "DIFFERS small, native: entry 1610 of 1610" in capsys.readouterr().out


def test_snapshots_from_elsewhere_are_compared(tmp_path: Path, capsys) -> None:
    files = [str(RECORDINGS / f"{name}.json.gz") for name in ("from_the_start", "inference")]
    kept = tmp_path / "kept"
    assert allocator_parity.main([*files, "--keep", str(kept)]) == 0
    assert "2 of 2 recordings equal, 5095 entries" in capsys.readouterr().out
    again = [str(path) for path in sorted(kept.iterdir())]
    assert len(again) == 2
    assert allocator_parity.main(again) == 0


def test_a_file_that_is_not_only_data_runs_nothing(tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(pickle.dumps(print))
    with pytest.raises(InvalidRequest, match=r"builtins\.print"):
        allocator_parity.read_file(bad)
    assert allocator_parity.main([str(bad)]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys) -> None:
    assert allocator_parity.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_cases_cover_every_setting_and_two_kinds_of_step() -> None:
    cases = list(allocator_parity.make_cases())
    assert len({case.name for case in cases}) == len(cases)
    keys = {case.allocator.partition(":")[0] for case in cases}
    assert keys == {
        "", "expandable_segments", "large_segment_size_mb", "roundup_power2_divisions",
        "max_split_size_mb", "garbage_collection_threshold",
    }  # fmt: skip
    assert Counter(bool(case.model) for case in cases)[True] == 8
    played = [event.nbytes for case in cases for event in case.tape]
    assert min(played.count(kind) for kind in (USED, CAUGHT_UP, EMPTIED)) > 5
    for case in cases:
        if case.model:
            request = api.read(case.model, device="h200-sxm", changes=dict(case.changes))
            assert api.predict(request).recipe.allocator == case.allocator
        if EMPTIED in [event.nbytes for event in case.tape]:
            assert case.allowed is None  # or it could not be told from a retry


def test_a_tape_is_played_on_the_streams_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple] = []

    class Stream:
        def synchronize(self) -> None:
            told.append(("caught up", self))

    class Storage:
        def record_stream(self, stream: Stream) -> None:
            told.append(("used", stream))

    def empty(nbytes: int, **_: object) -> Storage:
        told.append(("alloc", nbytes))
        if nbytes == 99:
            raise torch.OutOfMemoryError
        return Storage()

    first = Stream()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: first)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append(("busy",)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append(("emptied",)))
    monkeypatch.setattr(torch, "empty", empty)
    live = allocator_parity._play(
        [
            Event(0, 5), Event(0, USED, 1), Event(0, FREED), Event(1, 99), Event(1, USED, 1),
            Event(1, FREED), Event(-1, CAUGHT_UP, 1), Event(2, 7, 1), Event(-1, EMPTIED),
        ]
    )  # fmt: skip
    assert list(live) == [2]
    kinds = [what[0] for what in told]
    assert kinds == ["alloc", "used", "busy", "alloc", "caught up", "alloc", "emptied"]
    assert told[1][1] is told[4][1] is not first


def test_a_history_takes_no_stack_where_a_recomputed_block_may_be_ending(monkeypatch) -> None:
    """Releases happen while the exception that ends it passes; torch 2.11 loses it then."""
    told: dict[str, Any] = {}
    for name in ("init", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1)
    )
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **k: told.update(k))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", dict)
    monkeypatch.setattr(allocator_parity, "_play", lambda tape: None)
    allocator_parity.record(allocator_parity.Case("empty", ""))
    assert told["context"] == "alloc"
