"""Measure every claim about CUDA on this machine's GPU, slice by slice, and go on where it stopped.

    python3 bench/on_gpu [--minutes 29] [--device cuda|cpu] [--slice NAME ...] [--out FOLDER]

Needs torch, transformers and peft; what else is missing comes from the wheels of `make gpu-pack`.
A row is written as soon as its unit is measured; what has a row is not measured again. Slices run
in the order of their value, each at most about 8 minutes of one run: a unit that has begun is
stopped by the run's end alone. `--device cpu` rehearses all of it on tiny models in under a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, NoReturn

from on_gpu import paths
from on_gpu.rows import LANDED, Key, Place, Row, Rows, Unit, key_of
from on_gpu.slices import MOST_MINUTES, NAMES, SLICES, Slice, list_units, missing
from on_gpu.worker import Worker, serve

SPARE = 2  # processes that import while another measures
MINUTES = 29.0  # where none are asked for
ASK = """
import json, sys
import torch
from memfit.train.run.machine import describe_environment
if not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device")
found = describe_environment(torch.device("cuda"))
found["free"], found["total"] = map(str, torch.cuda.mem_get_info())
print(json.dumps(found))
"""


def main(arguments: list[str] | None = None) -> int:
    asked = _parse(arguments)
    said = paths.prepare()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    if not asked.worker:  # which starts with what its unit states
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
    if asked.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # tiny models: a second thread only waits, and waits busily
        )
    if asked.list:
        return _list(asked)
    if asked.worker:
        return serve(Place(asked.device, asked.row, asked.out))
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CONFIG_HOME"] = empty  # no device rows of the user's own
        try:
            return _run(asked, said)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on", file=sys.stderr)
            return 130


def _list(asked: argparse.Namespace) -> int:
    """Name the units of a device, which need not be here."""
    place = Place(asked.device, asked.row or "h100-sxm", asked.out)
    for one in SLICES:
        for unit in list_units(one, place) if one.name in asked.slice else ():
            print(f"{one.name}: {unit.name}")
    return 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all slices together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--slice", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--out", type=Path, help="default: build/gpu, or build/gpu-rehearsal")
    parser.add_argument("--again", action="store_true", help="units that failed once more")
    parser.add_argument("--fresh", action="store_true", help="measure what has landed before, too")
    parser.add_argument("--list", action="store_true", help="name the units and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--row", default="", help="with --list: of which GPU's catalogue row")
    asked = parser.parse_args(arguments)
    if not asked.minutes > 0:
        parser.error(f"--minutes {asked.minutes:g} leaves no time\nhint: 29 is the default")
    if asked.out is None:
        asked.out = paths.ROOT / "build" / ("gpu" if asked.device == "cuda" else "gpu-rehearsal")
    return asked


def _run(asked: argparse.Namespace, said: list[str]) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    with _log(asked.out / "log.txt") as say:
        for line in [*said, *paths.old_versions()]:
            say(line)
        found = _ask(asked.device)
        say(", ".join(f"{name} {value}" for name, value in paths.versions().items()))
        if isinstance(found, str):
            say(f"cannot start: {found}")
            say("hint: `--device cpu` rehearses without a GPU")
            return 2
        place = Place(asked.device, _row_of(found, asked.device), asked.out)
        say(", ".join(f"{name} {value}" for name, value in found.items()))
        rows = Rows(asked.out / "rows.jsonl", None if asked.fresh else LANDED)
        return Run(asked, place, rows, found | paths.versions(), say).all()


@contextmanager
def _log(path: Path) -> Iterator[Any]:
    with path.open("a", encoding="utf-8") as file:

        def say(line: str) -> None:
            for to in (file, sys.stdout):
                print(line, file=to, flush=True)

        yield say


def _ask(device: str) -> dict[str, str] | str:
    """What torch says of the device, in a process that is gone before anything is measured."""
    if device == "cpu":
        return {"device": platform.machine(), "platform": platform.platform()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["torch does not start"])[-1]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row_of(found: dict[str, str], device: str) -> str:
    from memfit import api
    from memfit.core.errors import Error

    if device == "cpu":
        return "cpu-x86"
    try:
        return api.find_device(found["device"]).id
    except Error as error:
        raise SystemExit(
            f"{error.message}\nhint: a row for this GPU in catalog/devices.toml"
        ) from None


class Run:
    """One run of the command: slices in turn until the minutes are over."""

    def __init__(
        self, asked: argparse.Namespace, place: Place, rows: Rows, environment: dict[str, str],
        say: Any,
    ) -> None:  # fmt: skip
        self._asked, self._place, self._rows, self._say = asked, place, rows, say
        self._environment = environment
        self._done: set[Key] = set()  # in this run: skipped or failed, they are not tried twice
        self._stop = time.monotonic() + 60 * asked.minutes
        self._crews = [Crew(place)]
        self._lock = Lock()  # of rows and words, which lanes share

    def all(self) -> int:
        """Each slice within its share, then each within what is left; 0 when nothing is left."""
        chosen = [one for one in SLICES if one.name in self._asked.slice]
        used = dict.fromkeys(chosen, 0.0)
        ahead = self._certify_ahead(chosen)
        left = 0
        try:
            for turn in (1, 2):
                left = 0
                for one in chosen:
                    start = time.monotonic()
                    left += self._slice(one, self._end(one, turn, used[one], chosen))
                    used[one] += time.monotonic() - start
                    for crew in () if self._place.rehearsal else self._crews:
                        crew.release()  # a rehearsal's process serves all slices
        finally:
            for crew in self._crews:
                crew.end()
            if ahead is not None:
                os.killpg(ahead.pid, signal.SIGKILL)
                ahead.wait()
        done = "every unit has its row" if not left else f"{left} units are left; run it again"
        self._say(f"{done}: {self._rows.path}")
        return 0

    def _certify_ahead(self, chosen: list[Slice]) -> subprocess.Popen[bytes] | None:
        """A process that makes the recipes' certificates meanwhile; it sees no GPU."""
        if self._place.rehearsal or all(one.name != "recipes" for one in chosen):
            return None
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "on_gpu.ahead", self._place.row],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _end(self, one: Slice, turn: int, used: float, chosen: list[Slice]) -> float:
        """When the slice's time is over, on the monotonic clock; at the first turn, its share."""
        most = 60 * MOST_MINUTES - used
        if turn == 1 and len(chosen) > 1:
            share = one.minutes / sum(other.minutes for other in chosen)
            most = min(most, 60 * self._asked.minutes * share)
        return min(self._stop, time.monotonic() + most)

    def _slice(self, one: Slice, end: float) -> int:
        """Measure what has no row until then; how many units are left."""
        units: deque[Unit] = deque()
        for unit in list_units(one, self._place):
            key = (one.name, unit.name, self._place.row)
            if key in self._done or self._rows.has(key, again=self._asked.again):
                continue
            if why := missing(unit):
                self._add({"slice": one.name, "name": unit.name, "skipped": why})
            else:
                units.append(unit)
        lanes = 1 if self._place.rehearsal else min(one.lanes, len(units))
        while len(self._crews) < lanes:
            self._crews.append(Crew(self._place))
        if lanes <= 1:
            return self._lane(one, units, end, self._crews[0]) + self._waiting(one, units)
        with ThreadPoolExecutor(lanes) as pool:
            work = [pool.submit(self._lane, one, units, end, c) for c in self._crews[:lanes]]
        for crew in self._crews[:lanes]:
            crew.end()  # Linux ends a process with the thread that started it, which is over now
        return sum(lane.result() for lane in work) + self._waiting(one, units)

    def _waiting(self, one: Slice, units: deque[Unit]) -> int:
        """How many units were not begun, which is told."""
        if units:
            like = f", of about {self._like(one):.0f} s each" if self._like(one) else ""
            self._tell(f"{one.name}: {len(units)} units wait{like}")
        return len(units)

    def _like(self, one: Slice) -> float:
        """Median seconds of the slice's units on this device so far; 0.0 where there are none."""
        with self._lock:
            took = [
                row["seconds"] for row in self._rows
                if row["slice"] == one.name and row["device"] == self._place.row
                and "seconds" in row and not {"failed", "skipped"} & row.keys()
            ]  # fmt: skip
        return median(took) if took else 0.0

    def _has_time(self, one: Slice, end: float) -> bool:
        """Whether a unit like the slice's others ends in the run, half of it before `end`."""
        now, like = time.monotonic(), self._like(one)
        return now + like / 2 < end and now + like <= self._stop

    def _lane(self, one: Slice, units: deque[Unit], end: float, crew: Crew) -> int:
        """Measure units as they come while there is time; how many were begun and not done."""
        left = 0
        while self._has_time(one, end):
            try:
                unit = units.popleft()
            except IndexError:  # another lane took the last one
                break
            left += not self._unit(one, unit, crew)
        return left

    def _unit(self, one: Slice, unit: Unit, crew: Crew) -> bool:
        """Whether the unit has its row now; it has none where only the run's time was over."""
        self._tell(f"{one.name}: {unit.name} …")
        alone = one.alone and not self._place.rehearsal
        worker = crew.hire(unit.allocator, spare=SPARE if alone else 0)
        start = time.monotonic()
        allowed = min(unit.seconds, self._stop - start)
        found = worker.measure(one.name, unit.name, allowed)
        if alone or not isinstance(found, dict):
            crew.release()
        if found is None and allowed < unit.seconds:
            self._tell("  stopped, as the time is over; the same command goes on")
            return False
        if found is None:
            found = {"failed": f"not done after {unit.seconds:.0f} s"}
        elif isinstance(found, str):
            found = {"failed": found}
        head = {"slice": one.name, "name": unit.name}
        self._add(head | found | {"seconds": round(time.monotonic() - start, 1)})
        return True

    def _tell(self, line: str) -> None:
        with self._lock:
            self._say(line)

    def _add(self, row: Row) -> None:
        row |= {"device": self._place.row, "environment": self._environment}
        if self._place.rehearsal:
            row["rehearsal"] = True  # which is never landed
        with self._lock:
            self._rows.add(row)
            self._done.add(key_of(row))
        how = next(
            (f"{word}: {row[word]}" for word in ("failed", "skipped") if word in row), "done"
        )
        self._tell(f"  {row['slice']}: {row['name']}: {how} ({row.get('seconds', 0)} s)")


class Crew:
    """The process that measures, and those that import meanwhile to take its place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._worker: Worker | None = None
        self._spare: list[Worker] = []  # with the allocator as it is by default

    def hire(self, allocator: str, *, spare: int) -> Worker:
        """A process whose allocator has these settings: the running one, one that waits, or new.

        spare: how many are to wait from now on.
        """
        if self._worker is not None and self._worker.allocator != allocator:
            self.release()
        if self._worker is None:
            waits = self._spare and not allocator
            self._worker = self._spare.pop(0) if waits else Worker(self._place, allocator)
        while len(self._spare) < spare:
            self._spare.append(Worker(self._place))
        return self._worker

    def release(self) -> None:
        """End the process that measured; those that wait stay."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def end(self) -> None:
        """End all of them."""
        self.release()
        while self._spare:
            self._spare.pop().end()
