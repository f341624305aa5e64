"""The replayed CUDA allocator beside the real one, entry by entry.

    python bench/allocator_parity.py               record on this machine's GPU, replay, compare
    python bench/allocator_parity.py FILE...       the same with snapshots recorded elsewhere
    python bench/allocator_parity.py --self-test   the whole path on recordings that memfit writes

On a GPU each case runs in a process of its own, with its own settings of the allocator: tapes made
for each rule (thresholds of splitting, pages, oversize blocks, garbage, a second stream with
record_stream, running out of memory under a fraction), and real training steps. Writes
bench/results/allocator_parity.json; `--keep FOLDER` also keeps the recordings, without source
lines, as tests/certify/recordings has them. FILE is what torch.cuda.memory._dump_snapshot wrote.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace
from parity import check_recording, read_snapshot

from memfit import api
from memfit.allocator.caching import OutOfMemory, follow
from memfit.allocator.settings import Settings, read_settings
from memfit.allocator.tape import CAUGHT_UP, EMPTIED, FREED, USED, Event
from memfit.certify.evidence.snapshot import RecordingAllocator, nowhere
from memfit.core.errors import Error, InvalidRequest
from memfit.core.units import GIB, KIB, MIB
from memfit.records import to_data, write_atomically

RESULTS = Path(__file__).parent / "results" / "allocator_parity.json"
MAX_ENTRIES = 2_000_000
BUSY = 2_000_000_000  # clock cycles that a stream is kept busy after a use: about a second
SMALL = (1, 511, 512, 513, 4 * KIB, 100 * KIB, MIB - 512, MIB)
EDGES = (
    MIB + 1, 2 * MIB, 9 * MIB, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 11 * MIB + 1, 18 * MIB,
    19 * MIB - 512, 19 * MIB, 20 * MIB, 20 * MIB + 1,
)  # fmt: skip
BIG = (24 * MIB, 40 * MIB, 63 * MIB, 64 * MIB, 83 * MIB, 84 * MIB, 100 * MIB, 190 * MIB)
PAGES = "expandable_segments:True"


class Case(NamedTuple):
    """A tape to play under some settings, or (without one) a training step's model and method."""

    name: str
    allocator: str
    tape: tuple[Event, ...] = ()
    allowed: int | None = None  # bytes, set as a fraction of the device
    model: str = ""
    changes: tuple[tuple[str, Any], ...] = ()


def make_tape(
    seed: int,
    length: int,
    sizes: Sequence[int],
    held: int,
    streams: int = 1,
    uses: float = 0.0,
    emptied: float = 0.0,
) -> tuple[Event, ...]:
    """Random allocations and releases; held: bytes alive at most, roughly.

    uses: share of storages that another stream uses; that stream catches up a little later.
    emptied: share of steps at which the cache is emptied.
    """
    draw = random.Random(seed)
    tape: list[Event] = []
    live: dict[int, int] = {}
    for tensor in range(length):
        while sum(live.values()) > held or (live and draw.random() < 0.45):
            gone = draw.choice(list(live))
            del live[gone]
            tape.append(Event(gone, FREED))
        live[tensor] = draw.choice(sizes) if draw.random() < 0.5 else draw.randint(1, max(sizes))
        stream = draw.randrange(streams)
        tape.append(Event(tensor, live[tensor], stream))
        if draw.random() < uses:
            other = (stream + 1) % streams
            tape += [Event(tensor, USED, other), Event(tensor, FREED)]
            del live[tensor]
            if draw.random() < 0.5:
                tape.append(Event(-1, CAUGHT_UP, other))
        if draw.random() < emptied:
            tape.append(Event(-1, EMPTIED))
    return tuple(tape)


def make_cases() -> Iterator[Case]:
    """Every rule of the allocator under every setting that changes it, then training steps."""
    rounded = "roundup_power2_divisions:[1:8,4:4,64:1,>:0]"
    for allocator in ("", PAGES, "large_segment_size_mb:64", rounded):
        kind = allocator or "native"
        yield Case(f"small, {kind}", allocator, make_tape(1, 600, SMALL, 64 * MIB))
        yield Case(f"edges, {kind}", allocator, make_tape(2, 600, EDGES, 400 * MIB))
        yield Case(f"1 to 10 MiB, {kind}", allocator, make_tape(3, 600, (10 * MIB,), 300 * MIB))
        mixed = make_tape(4, 800, (*SMALL, *EDGES, *BIG), GIB, emptied=0.01)
        yield Case(f"mixed, {kind}", allocator, mixed)
    for megabytes in (20, 64):
        oversize = make_tape(5, 500, (*EDGES, *BIG), GIB)
        setting = f"max_split_size_mb:{megabytes}"
        yield Case(f"oversize, {setting}", setting, oversize)
        yield Case(f"oversize and full, {setting}", setting, oversize, allowed=GIB)
    garbage = make_tape(6, 600, (*EDGES, *BIG), GIB)
    yield Case("garbage", "garbage_collection_threshold:0.5", garbage, allowed=2 * GIB)
    for allocator in ("", PAGES):
        kind = allocator or "native"
        two = make_tape(7, 500, (*SMALL, *EDGES), 400 * MIB, streams=2)
        yield Case(f"two streams, {kind}", allocator, two)
        delayed = make_tape(8, 120, (*SMALL, *EDGES), 400 * MIB, streams=2, uses=0.15)
        yield Case(f"record_stream, {kind}", allocator, delayed)
        full = make_tape(9, 500, (*EDGES, *BIG), GIB)
        yield Case(f"out of memory, {kind}", allocator, full, allowed=GIB)
    for allocator in ("", PAGES):
        for method in ("full", "lora"):
            for recompute in ("none", "full"):
                changes = (
                    ("method", method), ("recompute", recompute), ("precision", "bf16-mixed"),
                    ("micro_batch", 2), ("task.global_batch", 4), ("task.sequence_length", 1024),
                    ("task.steps", 10), ("optimizer.name", "adamw"), ("weights", "random"),
                    ("optimizer.implementation", "foreach"), ("attention", "flash"),
                    ("loss", "plain"), ("allocator", allocator),
                )  # fmt: skip
                name = f"step, {method}, recompute {recompute}, {allocator or 'native'}"
                yield Case(name, allocator, model="qwen3-0.6b", changes=changes)


def settings_of(case: Case, device_memory: int) -> Settings:
    """The settings under which a case runs on a device of so many bytes."""
    settings = read_settings(case.allocator, device_memory=device_memory)
    if case.allowed is None:
        return settings
    return replace(settings, memory_fraction=case.allowed / device_memory)


def record(case: Case) -> dict[str, Any]:
    """Run a case on the GPU with torch's own history of it; in a process of its own."""
    import torch

    from memfit.train.measure.cuda_allocator import set_allocator

    set_allocator(case.allocator)
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    if case.allowed is not None:
        torch.cuda.set_per_process_memory_fraction(case.allowed / total)
    # no stacks of releases: torch 2.11 takes them while the exception passes that ends a recomputed
    # block, and loses it (pytorch/pytorch#179536)
    torch.cuda.memory._record_memory_history(
        max_entries=MAX_ENTRIES, context="alloc", stacks="python"
    )
    kept: Any = _step(case) if case.model else _play(case.tape)
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    del kept
    return dict(snapshot) | {"device_memory": total, "torch": torch.__version__}


def _step(case: Case) -> object:
    """The rehearsal and the steps of `memfit measure`."""
    from memfit.train.measure.counters import measure

    recipe = api.predict(api.read(case.model, device="auto", changes=dict(case.changes))).recipe
    return measure(recipe, api.find_device(recipe.device), steps=1)


def _play(tape: Sequence[Event]) -> dict[int, Any]:
    """Do on the GPU what a tape says; what does not fit is left out, as a program may do."""
    import torch

    streams: dict[int, Any] = {0: torch.cuda.default_stream()}
    live: dict[int, Any] = {}
    for tensor, nbytes, number in tape:
        stream = streams.setdefault(number, torch.cuda.Stream()) if number else streams[0]
        if nbytes > 0:
            with torch.cuda.stream(stream):
                try:
                    live[tensor] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    continue
        elif nbytes == FREED:
            live.pop(tensor, None)
        elif nbytes == USED and tensor in live:
            live[tensor].record_stream(stream)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY)
        elif nbytes == CAUGHT_UP:
            stream.synchronize()
        elif nbytes == EMPTIED:
            torch.cuda.empty_cache()
    return live


def imitate(case: Case) -> dict[str, Any]:
    """What `record` would give if torch did what the replay does."""
    total = 80 * GIB
    allocator = RecordingAllocator(settings_of(case, total), nowhere)
    for event in case.tape:
        try:
            follow(allocator, event)
        except OutOfMemory:
            continue
    return {
        "segments": list(allocator.describe_segments()),
        "device_traces": [allocator.entries],
        "device_memory": total,
        "torch": "imitated",
    }


def strip(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Only what the comparison needs: no source lines, no times."""
    entries = ("action", "addr", "size", "stream")
    segments = ("device", "address", "total_size", "stream", "segment_type", "is_expandable")
    blocks = ("size", "requested_size", "state")

    def keep(names: Sequence[str], data: dict[str, Any]) -> dict[str, Any]:
        return {name: data[name] for name in names if name in data}

    return {
        **keep(("device_memory", "torch", "allocator_settings"), snapshot),
        "segments": [
            {**keep(segments, s), "blocks": [keep(blocks, b) for b in s["blocks"]]}
            for s in snapshot["segments"]
        ],
        "device_traces": [[keep(entries, e) for e in t] for t in snapshot["device_traces"]],
    }


def compare(
    name: str, snapshot: dict[str, Any], settings: Settings | None, keep: Path | None = None
) -> dict[str, Any]:
    """One row: how much was compared, and the first difference if there is one."""
    if keep is not None:
        words = "".join(c if c.isalnum() else "_" for c in name)
        text = json.dumps(strip(snapshot), separators=(",", ":")).encode()
        keep.mkdir(parents=True, exist_ok=True)
        write_atomically(keep / f"{words}.json.gz", gzip.compress(text, 9, mtime=0))
    used = [n for n, trace in enumerate(snapshot["device_traces"]) if trace]
    found = read_snapshot(snapshot, device=used[0] if used else 0, settings=settings)
    kinds = sorted({e["action"] for e in found.entries})
    row = {"name": name, "kinds": kinds, "streams": len({e["stream"] for e in found.entries})}
    return row | to_data(check_recording(found))


def run_case(number: int, keep: Path | None) -> dict[str, Any]:
    """Record a case in a process of its own and compare it here."""
    case = list(make_cases())[number]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recorded.pickle"
        command = [sys.executable, __file__, "--record", str(number), str(file)]
        environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {"name": case.name, "failed": said[-1]}
        snapshot = read_file(file)
    return compare(case.name, snapshot, settings_of(case, snapshot["device_memory"]), keep)


class _OnlyData(pickle.Unpickler):
    """Reads what snapshots are made of, and runs nothing that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        raise InvalidRequest(f"the file names `{module}.{name}`, and a snapshot is only data")


def read_file(path: Path) -> dict[str, Any]:
    """A snapshot as torch pickles it, or as `--keep` wrote it."""
    if path.suffix == ".gz":
        return dict(json.loads(gzip.decompress(path.read_bytes())))
    with path.open("rb") as file:
        return dict(_OnlyData(file).load())


def show(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"FAILED  {row['name']}: {row['failed']}"
    if (at := row["divergence"]) is None:
        return f"equal   {row['name']}: {row['entries']} entries, {row['streams']} streams"
    where = f" ({at['frame']})" if at["frame"] else ""
    return (
        f"DIFFERS {row['name']}: entry {at['entry']} of {row['entries']}{where}:"
        f" torch {at['recorded']}; replay {at['replayed']}"
    )


def collect(work: Sequence[Callable[[], dict[str, Any]]], out: Path | None, device: str) -> int:
    """Do all the work, say how each went, write the rows; 0 when all are equal."""
    rows = []
    for one in work:
        try:
            rows.append(one())
        except Error as error:
            rows.append({"name": "recording", "failed": error.message})
        print(show(rows[-1]), flush=True)
    equal = [row for row in rows if row.get("divergence", "") is None]
    entries = sum(row["entries"] for row in equal)
    print(f"{len(equal)} of {len(rows)} recordings equal, {entries} entries")
    if out is not None:
        machine = {
            "device": device, "python": platform.python_version(), "torch": version("torch"),
        }  # fmt: skip
        text = json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text.encode())
    return 0 if len(equal) == len(rows) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--self-test", action="store_true", help="without a GPU")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="also keep the recordings")
    parser.add_argument("--out", type=Path, help="default on a GPU: bench/results")
    parser.add_argument("--record", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    cases = list(make_cases())
    if asked.record:
        snapshot = record(cases[int(asked.record[0])])
        Path(asked.record[1]).write_bytes(pickle.dumps(snapshot, protocol=4))
        return 0
    work: list[Callable[[], dict[str, Any]]]
    if asked.files:
        work = [lambda f=f: compare(f.name, read_file(f), None, asked.keep) for f in asked.files]
        return collect(work, asked.out, "recorded elsewhere")
    if asked.self_test:
        work = [
            lambda c=c: compare(c.name, imitate(c), settings_of(c, 80 * GIB), asked.keep)
            for c in cases
            if c.tape
        ]
        return collect(work, asked.out, "none: a self-test")
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: torch finds none; --self-test runs without one", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(0)
    work = [lambda n=n: run_case(n, asked.keep) for n in range(len(cases))]
    return collect(work, asked.out or RESULTS, name)


if __name__ == "__main__":
    sys.exit(main())
