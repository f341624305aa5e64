"""`make gpu` on a CPU: killed within every slice, then run again, it ends with every row."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest
import torch

from memfit.core.errors import InvalidRequest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from on_gpu import join, marked, pack, paths, recipes, recordings, rollouts, run  # noqa: E402
from on_gpu.rows import LANDED, Place, Rows, Unit, read_rows  # noqa: E402
from on_gpu.slices import NAMES, SLICES, list_units, measure  # noqa: E402

COMMAND = [sys.executable, "-W", "ignore", str(ROOT / "bench" / "on_gpu"), "--device", "cpu"]
SEVERAL = ("allocator", "rates", "kernels")  # whose twins have more than one unit


@pytest.fixture(autouse=True)
def _same_process():
    """The command sets variables and a handler of its process, which is the tests' here."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    os.environ.clear()
    os.environ.update(before)
    signal.signal(signal.SIGTERM, handler)


def start(out, *options):
    return subprocess.Popen(
        [*COMMAND, "--out", str(out), *options], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def kill_within(out, name):
    """SIGKILL while a unit of the slice is measured: the second one where there are several."""
    with start(out, "--slice", name) as process:
        begun = 0
        for line in process.stdout:
            begun += line.startswith(f"{name}: ") and line.rstrip().endswith("…")
            if begun == (2 if name in SEVERAL else 1):
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not orphans(out), "what a killed command had started is gone too"


def orphans(out):
    """Processes that still measure into a folder, after they have had time to die."""
    for _ in range(300):
        found = [
            path for path in Path("/proc").glob("[0-9]*/cmdline")
            if str(out).encode() in read(path) and b"--worker" in read(path)
        ]  # fmt: skip
        if not found:
            return []
        time.sleep(0.1)
    return found


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a worker dies with its parent on Linux")
@pytest.mark.parametrize(("killed", "names"), [
    pytest.param(("allocator",), ("allocator",), id="the second of several"),
    pytest.param(NAMES, NAMES, marks=pytest.mark.wide, id="every slice"),
])  # fmt: skip
def test_the_rehearsal_goes_on_where_it_was_killed(killed, names, tmp_path):
    for name in killed:
        kill_within(tmp_path, name)
    before = read_rows(tmp_path / "rows.jsonl")
    assert {row["slice"] for row in before.values()} == {*SEVERAL} & {*killed}
    with start(tmp_path, "--slice", *names) as process:
        said = process.stdout.read()
    assert process.returncode == 0, said
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row.get("failed") for row in rows] == [None] * len(rows), said
    assert {row["slice"] for row in rows} == set(names)
    keys = [(row["slice"], row["name"]) for row in rows]
    assert len(keys) == len(set(keys)), "what has a row is not measured again"
    assert all(row["rehearsal"] for row in rows)
    assert "every unit has its row" in said
    assert len(list(tmp_path.iterdir())) <= 8
    for row in (row for row in rows if row["slice"] in ("recipes", "rollouts")):
        assert row["measured"]["peak_allocated"] == row["certified"]["peak_allocated"]


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
@pytest.mark.parametrize("name", ["recipes", "rollouts"])
def test_a_recipe_is_rehearsed_and_holds_what_is_certified(name, tmp_path):
    """In this process; `make test-wide` has every slice, each unit in a process of its own."""
    place = Place("cpu", "cpu-x86", tmp_path)
    (unit,) = list_units(next(one for one in SLICES if one.name == name), place)
    row = measure(name, unit.name, place)
    assert "failed" not in row, row
    assert row["measured"]["peak_allocated"] == row["certified"]["peak_allocated"] > 0


def test_what_a_gpu_held_in_iterations_is_in_the_range_that_is_planned():
    rows = [row for row in read_rows(LANDED).values() if row["slice"] == "rollouts"]
    assert rows
    for row in (row for row in rows if "measured" in row):
        model, _, changes = rollouts.CASES[row["name"]]
        plan = recipes.make_plan(model, changes, row["device"])
        assert plan.recipe_digest == row["recipe_digest"]
        low, high = plan.memory.total_low, plan.memory.total_high
        assert low <= row["measured"]["device_total"] <= high, row["name"]


def test_a_row_that_was_cut_is_measured_again_and_what_was_skipped_is_tried_again(tmp_path):
    file = tmp_path / "rows.jsonl"
    whole = {"slice": "a", "name": "1", "device": "d"}
    file.write_text(json.dumps(whole) + '\n{"slice": "a", "na')
    rows = Rows(file, None)
    assert rows.has(("a", "1", "d"))
    assert not rows.has(("a", "2", "d"))
    rows.add({"slice": "a", "name": "2", "device": "d", "skipped": "not installed: x"})
    rows.add({"slice": "a", "name": "3", "device": "d", "failed": "it broke"})
    rows.add({"slice": "a", "name": "4", "device": "d", "broken": {"test_a": "assert 2 < 1"}})
    rows.add({"slice": "a", "name": "5", "device": "d", "broken": {}})
    again = Rows(file, None)
    assert not again.has(("a", "2", "d"))
    assert [again.has(("a", name, "d"), again=True) for name in "45"] == [False, True]
    assert again.has(("a", "3", "d"))
    assert not again.has(("a", "3", "d"), again=True)
    assert len(file.read_text().splitlines()) == 5


class Broken:
    """A worker that crashes, hangs, or has no time left, by the unit's name."""

    def __init__(self, place, allocator=""):
        self.allocator = allocator

    def measure(self, slice_name, unit, seconds):
        return {"small, native": "signal 9: it died", "edges, native": None}.get(unit, {"x": 1})

    def end(self):
        pass


def test_a_crash_and_a_hang_are_rows_with_their_reasons(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "Worker", Broken)
    monkeypatch.setattr(run.paths, "prepare", list)
    options = ["--device", "cpu", "--slice", "allocator", "--out", str(tmp_path), "--minutes"]
    assert run.main([*options, "9"]) == 0
    rows = {key[1]: row for key, row in read_rows(tmp_path / "rows.jsonl").items()}
    assert rows["small, native"]["failed"] == "signal 9: it died"
    assert rows["edges, native"]["failed"] == "not done after 120 s"
    assert rows["mixed, native"]["x"] == 1
    assert "every unit has its row" in capsys.readouterr().out


def test_a_unit_for_which_the_run_has_no_time_left_has_no_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "Worker", Broken)
    monkeypatch.setattr(run.paths, "prepare", list)
    options = ["--device", "cpu", "--slice", "allocator", "--out", str(tmp_path), "--minutes"]
    run.main([*options, "1"])
    names = {key[1] for key in read_rows(tmp_path / "rows.jsonl")}
    assert "edges, native" not in names
    assert "1 units are left" in capsys.readouterr().out


class Timed:
    """A worker whose every unit takes 100 s of a clock that stands still meanwhile."""

    now, begun = 0.0, []

    def __init__(self, place, allocator=""):
        self.allocator = allocator

    def measure(self, slice_name, unit, seconds):
        self.begun.append(slice_name)
        type(self).now += min(seconds, 100.0)
        return {"x": 1} if seconds >= 100.0 else None

    def end(self):
        pass


@pytest.fixture
def on_a_clock(monkeypatch):
    """`run.main` with ten units a slice of 100 s each."""
    monkeypatch.setattr(Timed, "now", 0.0)
    monkeypatch.setattr(Timed, "begun", [])
    monkeypatch.setattr(run, "Worker", Timed)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: Timed.now))
    monkeypatch.setattr(run, "list_units", lambda one, place: [Unit(str(n)) for n in range(10)])
    monkeypatch.setattr(run.paths, "prepare", list)


@pytest.mark.usefixtures("on_a_clock")
def test_a_unit_that_has_begun_is_stopped_by_the_end_of_the_run_alone(tmp_path, capsys):
    """Of 9 minutes 6 are recipes' and 3 rates', whatever the other slices' shares are: recipes'
    fourth unit begins 60 s before the 6 minutes are over and ends 40 s after; rates' first takes
    until 500 s, and nothing more would end in 540.
    """
    options = ["--device", "cpu", "--out", str(tmp_path), "--slice", "recipes", "rates"]
    assert run.main([*options, "--minutes", "9"]) == 0
    assert Timed.begun == ["recipes"] * 4 + ["rates"]
    assert len(read_rows(tmp_path / "rows.jsonl")) == 5
    assert "15 units are left" in capsys.readouterr().out


@pytest.mark.usefixtures("on_a_clock")
def test_how_long_a_slices_units_took_before_counts(tmp_path, capsys):
    rows = Rows(tmp_path / "rows.jsonl", None)
    head = {"slice": "rates", "device": "cpu-x86"}
    rows.add(head | {"name": "0", "seconds": 500.0})
    rows.add(head | {"name": "1", "seconds": 1.0, "failed": "it broke"})
    options = ["--device", "cpu", "--out", str(tmp_path), "--slice", "rates", "--minutes"]
    assert run.main([*options, "8"]) == 0
    assert Timed.begun == []
    assert "rates: 8 units wait, of about 500 s each" in capsys.readouterr().out
    assert run.main([*options, "8.4"]) == 0
    assert Timed.begun[0] == "rates"


def test_no_time_and_no_gpu_are_told_of_with_a_hint(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run.main(["--minutes", "0"])
    assert "hint: 29 is the default" in capsys.readouterr().err
    monkeypatch.setattr(run.paths, "prepare", list)
    monkeypatch.setattr(run, "_ask", lambda _: "torch finds no CUDA device")
    assert run.main(["--out", str(tmp_path)]) == 2
    assert "hint: `--device cpu` rehearses" in capsys.readouterr().out


def test_what_memfit_refuses_is_skipped_and_tried_again(tmp_path, monkeypatch):
    """What these versions of libraries cannot do is nobody's failure."""

    def refuse(*_):
        raise InvalidRequest("this torch has no such kernel")

    monkeypatch.setattr(recipes, "make_plan", lambda *_: SimpleNamespace(recipe_digest="", memory=3,
                        recipe=SimpleNamespace(compile="none")))  # fmt: skip
    monkeypatch.setattr(recipes, "three", lambda memory: {})
    monkeypatch.setattr(recipes, "Certifying", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(recipes, "_measure", refuse)
    (name,) = recipes.TWINS
    row = measure("recipes", name, Place("cpu", "cpu-x86", tmp_path))
    assert row["skipped"] == "this torch has no such kernel"
    assert "failed" not in row


def entry(action, address, size, line=0):
    frames = [{"filename": "/x/memfit/train/step.py", "line": line, "name": "step"}]
    return {"action": action, "addr": address, "size": size, "frames": frames}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_program_that_asks_for_a_gpu_starts():
    assert run._ask("cuda") == "torch finds no CUDA device"


def test_a_unit_runs_in_a_process_whose_allocator_has_its_settings(tmp_path, monkeypatch):
    """Settings are those a process starts with: bitsandbytes starts CUDA when it is imported."""
    hired = []

    class Noted(Broken):
        def measure(self, slice_name, unit, seconds):
            hired.append((unit, self.allocator))
            return {"x": 1}

    units = [Unit("a"), Unit("b", allocator="expandable_segments:True"), Unit("c")]
    monkeypatch.setattr(run, "Worker", Noted)
    monkeypatch.setattr(run, "list_units", lambda one, place: units)
    monkeypatch.setattr(run.paths, "prepare", list)
    assert run.main(["--device", "cpu", "--slice", "grid", "--out", str(tmp_path)]) == 0
    assert hired == [("a", ""), ("b", "expandable_segments:True"), ("c", "")]


def test_units_that_ask_neither_clock_nor_driver_run_side_by_side(tmp_path, monkeypatch):
    together, most, lock = [0], [0], Lock()

    class Slow(Broken):
        def measure(self, slice_name, unit, seconds):
            with lock:
                together[0] += 1
                most[0] = max(most[0], together[0])
            time.sleep(0.2)
            with lock:
                together[0] -= 1
            return {"x": 1}

    monkeypatch.setattr(run, "Worker", Slow)
    monkeypatch.setattr(run.paths, "prepare", list)
    monkeypatch.setattr(run, "_ask", lambda _: {"device": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setattr(run, "list_units", lambda one, place: [Unit(str(n)) for n in range(9)])
    found = {}
    for name in ("allocator", "recipes"):
        most[0] = 0
        out = tmp_path / name
        assert run.main(["--fresh", "--slice", name, "--out", str(out), "--minutes", "1"]) == 0
        assert len(read_rows(out / "rows.jsonl")) == 9
        found[name] = most[0]
    assert found == {"allocator": 4, "recipes": 1}


def test_a_history_is_joined_with_a_certificate_by_bytes():
    trace = [
        entry("alloc", 1, 1000), entry("alloc", 2, 5000, 7), entry("free_completed", 1, 1000),
        entry("alloc", 3, 1000), entry("alloc", 4, 3000), entry("free_completed", 2, 5000),
    ]  # fmt: skip
    tensors = [
        {"nbytes": 1000, "count": 2, "kind": "activations", "module": "m", "op": ""},
        {"nbytes": 2900, "kind": "logits", "module": "head", "op": ""},
    ]
    found = join.join_snapshot({"device_traces": [[], trace]}, tensors, 100)
    assert found["peak"] == 1024 + 5120 + 3072
    assert found["explained"] == {"activations": 1024, "logits": 3072}
    assert found["only_measured"] == [{"what": "train/step.py:7 step", "bytes": 5120}]
    assert found["only_certified"] == [{"what": "activations: m", "bytes": 1024}]
    assert found["whole"]


def test_recordings_are_kept_in_one_archive_that_is_always_whole(tmp_path, monkeypatch):
    archive = tmp_path / "recordings.tar"
    for name in ("a.json.gz", "b.json.gz", "a.json.gz"):
        (tmp_path / name).write_bytes(name.encode() * 10)
        assert recordings.keep(archive, tmp_path / name)
    with tarfile.open(archive) as kept:
        assert sorted(kept.getnames()) == ["a.json.gz", "b.json.gz"]
    monkeypatch.setattr(recordings, "KEPT", 10)
    assert not recordings.keep(archive, tmp_path / "a.json.gz")


def test_a_wheel_is_used_where_its_library_is_missing_and_its_python_is_this_one(
    tmp_path, monkeypatch
):
    here = f"cp3{sys.version_info[1]}"
    names = (
        f"made_up_a-1-{here}-{here}-linux_x86_64", "made_up_b-1-py3-none-any",
        "made_up_c-1-cp32-abi3-linux_x86_64", "made_up_d-1-cp32-cp32-linux_x86_64",
        "pytest-1-py3-none-any",
    )  # fmt: skip
    for name in names:
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}.py", "here = True\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "kept")
    said = paths.prepare(tmp_path)
    unpacked = {path.name for path in (tmp_path / "unpacked").iterdir()}
    assert unpacked == set(names[:3])
    assert any("made_up_d" in line and "another Python" in line for line in said)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[-1] == "kept"
    assert "made_up_a" in __import__("made_up_a").__name__


def test_bitsandbytes_keeps_the_libraries_of_this_cuda_alone(tmp_path):
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = ("cuda118", "cuda130", "rocm70", "cpu")
    with zipfile.ZipFile(wheel, "w") as made:
        for name in names:
            made.writestr(f"bitsandbytes/libbitsandbytes_{name}.so", name)
        made.writestr("bitsandbytes/__init__.py", "")
        made.writestr("bitsandbytes-1.dist-info/RECORD", "old")
    pack.slim(wheel)
    with zipfile.ZipFile(wheel) as slim:
        kept = [n for n in slim.namelist() if n.endswith(".so")]
        record = io.StringIO(slim.read("bitsandbytes-1.dist-info/RECORD").decode())
        assert {line.split(",")[0] for line in record} == {i.filename for i in slim.infolist()}
    assert [n.rpartition("_")[2] for n in kept] == ["cuda130.so", "cpu.so"]


def test_the_slice_of_tests_has_every_file_that_is_marked(tmp_path):
    units = {unit.name for unit in marked.list_units(Place("cuda", "h100-sxm", tmp_path))}
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "tests/gpu").glob("test_*.py")} <= units
    assert "tests/optimizers/test_host_states.py" in units
