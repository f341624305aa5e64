"""Signals at random moments of tiny runs, alone and on two ranks, and what the runs end with.

    python bench/campaign/kills.py [--seed N] [--runs N] [--seconds S] [--out FILE]

Each run gets about five signals, each drawn with its moment: SIGKILL, SIGTERM or SIGINT of one
rank or of all, or SIGSTOP and later SIGCONT of one; some seconds after the start, some steps after
it, or while a checkpoint is being written. After a signal that ends it, the same run is started
again. Every third run is on two ranks. Held: losses and weights are bit for bit those of a run that
got no signal, the log has each step once, nothing is left but what a run leaves, all processes are
gone 5 s after a signal that ends the run, and only a finished run exits 0.
Results: bench/results/campaign_kills.json.

What starts these ranks does what every launcher does where one ends before they have met: it ends
the others, which cannot know of it. Later nobody looks after them (tests/train/ranks_run.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests")]

from test_many_ranks import SHARDS, start_runs  # noqa: E402

from memfit.records import read_json, write_atomically  # noqa: E402
from memfit.records.results import Run  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_kills.json"
SIGNALS = 5  # of a run, where it does not end before
STEPS = 24
ORPHANED = 5.0  # seconds
PATIENCE = 120.0  # seconds for a moment to come
ENDING = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WRITING = (".unfinished-*", "*/.unfinished-*")
LEFT = {".lock"}


class Started:
    """A run that was started, until all of its processes have ended."""

    def __init__(self, runs: Any, name: str, order: dict[str, Any]) -> None:
        self.runs, self.folder = runs, runs.folder / name
        self.pids: list[int] = runs.start(name, **order)
        self.codes: dict[int, int] = {}

    def hear(self, seconds: float) -> None:
        """Note a process that ends within so many seconds."""
        self.runs.hear(max(seconds, 0.0005))
        self.codes = {p: c for p, c in self.runs.codes().items() if c is not None}

    def wait(self, found: Callable[[], object], seconds: float = PATIENCE) -> bool:
        """Whether it came to that before a process ended."""
        limit = time.monotonic() + seconds
        while not self.codes and time.monotonic() < limit:
            if found():
                return True
            self.hear(0.0005)
        return False

    def end(self, seconds: float) -> bool:
        """Whether all processes end within so many seconds."""
        limit = time.monotonic() + seconds
        while len(self.codes) < len(self.pids) and time.monotonic() < limit:
            self.hear(0.05)
        return len(self.codes) == len(self.pids)

    def steps(self) -> int:
        """Lines of the log."""
        try:
            return (self.folder / "log.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def is_writing(self) -> bool:
        """Whether a checkpoint or the model is half written."""
        return any(any(self.folder.glob(pattern)) for pattern in WRITING)


def reach(run: Started, chance: random.Random) -> str:
    """Wait for a moment; its name, empty where the run ended before."""
    moment = chance.choice(("time", "steps", "writing"))
    if moment == "time":
        until = time.monotonic() + chance.uniform(0, 2.0)
        return moment if run.wait(lambda: time.monotonic() > until) else ""
    if moment == "steps":
        goal = run.steps() + chance.randrange(1, 8)
        return moment if run.wait(lambda: run.steps() >= goal) else ""
    stale = run.is_writing()  # of a run that was killed
    if stale:
        run.wait(lambda: not run.is_writing())
    return moment if run.wait(run.is_writing) else ""


def send(run: Started, chance: random.Random) -> list[str]:
    """Send a signal, or a stop and a continue; what was sent."""
    alive = [pid for pid in run.pids if pid not in run.codes]
    if chance.random() < 0.3:
        one = chance.choice(alive)
        os.kill(one, signal.SIGSTOP)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(one, signal.SIGCONT)
        return ["SIGSTOP", "SIGCONT"]
    number = chance.choice(ENDING)
    chosen = alive if chance.random() < 0.4 else [chance.choice(alive)]
    for pid in chosen:
        os.kill(pid, number)
    return [number.name] * len(chosen)


def check(run: Started, whole: tuple[Any, bytes]) -> list[str]:
    """What a finished run has lost, or left."""
    losses, weights = whole
    found = []
    ended = read_json(run.folder / "run.json", Run)
    if ended.losses != losses:
        found.append("losses differ")
    if (run.folder / "model" / "model.safetensors").read_bytes() != weights:
        found.append("weights differ")
    logs = [run.folder / "log.jsonl", *run.folder.glob("ranks/*/log.jsonl")]
    for log in logs:
        steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        if steps != list(range(1, STEPS + 1)):
            found.append(f"{log.relative_to(run.folder)} has steps {steps}")
    left = {str(p.relative_to(run.folder)) for p in run.folder.rglob(".*")} - LEFT
    if left:
        found.append(f"left: {sorted(left)}")
    return found


def try_run(
    runs: Any,
    name: str,
    order: dict[str, Any],
    whole: Any,
    chance: random.Random,
    said: Counter[str],
) -> tuple[list[str], float]:
    """One run and its signals; what was wrong, and the longest that a process outlived a signal."""
    failures: list[str] = []
    longest, sent = 0.0, 0
    run = Started(runs, name, order)
    for _ in range(50):
        moment = reach(run, chance) if sent < SIGNALS else ""
        if moment:
            with suppress(ProcessLookupError):
                signals = send(run, chance)
                sent += len(signals)
                said.update(signals)
                said[f"at: {moment}"] += 1
                if "SIGCONT" in signals:
                    continue
        began = time.monotonic()
        if not run.end(ORPHANED if moment else PATIENCE):
            alive = [pid for pid in run.pids if pid not in run.codes]
            finishing = moment and run.end(PATIENCE) and set(run.codes.values()) == {0}
            if not finishing:
                failures.append(f"{len(alive)} processes outlived {moment or 'the run'}")
            run.runs.clear()
            run.hear(0.01)
        if moment:
            longest = max(longest, time.monotonic() - began)
        if 0 in run.codes.values():
            break
        run = Started(runs, name, order)
    if set(run.codes.values()) != {0}:
        return [*failures, f"ended with {run.codes}"], longest
    return [*failures, *check(run, whole)], longest


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    said: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    done = many = 0
    longest, commit = 0.0, find_commit()
    orders = {1: {"steps": STEPS, "micro_batch": 4}, 2: {"steps": STEPS, "parallel": SHARDS}}
    with tempfile.TemporaryDirectory(prefix="memfit-") as place, start_runs(Path(place)) as runs:
        whole: dict[int, Any] = {}
        for ranks, order in orders.items():
            losses = runs.whole(f"whole {ranks}", **order).losses
            model = Path(place) / f"whole {ranks}" / "model" / "model.safetensors"
            whole[ranks] = losses, model.read_bytes()
        for number in range(asked.runs):
            if time.monotonic() > until:
                break
            chance = random.Random(f"{asked.seed} {number}")
            ranks = 2 if number % 3 == 0 else 1
            order = dict(orders[ranks], asynchronous=chance.random() < 0.5)
            name = f"run {number}"
            wrong, seconds = try_run(runs, name, order, whole[ranks], chance, said)
            done, many, longest = done + 1, many + (ranks == 2), max(longest, seconds)
            if wrong:
                failures.append({"run": number, "ranks": ranks, "wrong": wrong})
                print(failures[-1], flush=True)
            shutil.rmtree(Path(place) / name, ignore_errors=True)
            if number % 10 == 9 or number == asked.runs - 1:
                signals = sum(count for key, count in said.items() if key.startswith("SIG"))
                answer = {
                    "seed": asked.seed, "commit": commit, "runs": done, "runs_on_two_ranks": many,
                    "signals": signals, "failed": len(failures),
                    "longest_seconds_to_end": round(longest, 2),
                    "sent": dict(sorted(said.items())), "failures": failures,
                }  # fmt: skip
                write_atomically(asked.out, (json.dumps(answer, indent=1) + "\n").encode())
                print(f"{done} runs, {signals} signals, {len(failures)} failed", flush=True)
    return 1 if failures else 0


def find_commit() -> str:
    """The commit that is tried, with a mark where something was changed since."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
