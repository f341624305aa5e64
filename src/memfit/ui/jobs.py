"""Certificates as jobs: each runs in processes of its own, can be cancelled, and keeps its result.

A job outlives the screen and the page that started it; it ends with the server.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

import msgspec

from memfit.certify import LAST_LINES
from memfit.core.errors import InvalidRequest
from memfit.core.system.processes import child_environment
from memfit.ui.job import Wanted

State = Literal["waiting", "running", "done", "failed", "cancelled"]
OPEN: tuple[State, ...] = ("waiting", "running")
MOST_FINISHED = 20  # finished jobs; a result is about 300 kB
MOST_WAITING = 20
ENDING = 10  # seconds that a process may take to end after its answer


class Row(msgspec.Struct, frozen=True):
    """A job's state in the list of jobs; its result has an endpoint of its own."""

    id: str
    query: dict[str, str]
    rank: int | None
    state: State
    phase: str  # what it is doing; "" unless it runs
    elapsed: float  # seconds since it began to run
    expected: float | None  # seconds of the last finished job of the same model and devices
    verdict: str  # of its certificate; "" before there is one
    failure: dict[str, Any] | None  # error, hint and exit_code of a failed one


@dataclass
class Job:
    """One requested certificate. Its fields change under the lock of `Jobs`."""

    id: str
    wanted: Wanted
    expected: float | None
    state: State = "waiting"
    phase: str = ""
    began: float = 0.0
    ended: float = 0.0
    verdict: str = ""
    result: bytes = b""
    failure: dict[str, Any] | None = None
    child: subprocess.Popen[str] | None = field(default=None, repr=False)

    def row(self) -> Row:
        """As it stands now."""
        until = self.ended or time.monotonic()
        return Row(
            id=self.id, query=self.wanted.query, rank=self.wanted.rank, state=self.state,
            phase=self.phase, elapsed=round(until - self.began, 1) if self.began else 0.0,
            expected=self.expected, verdict=self.verdict, failure=self.failure,
        )  # fmt: skip


class Jobs:
    """All jobs of a server. One runs at a time; the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}  # the oldest first
        self._seconds: dict[tuple[str, ...], float] = {}
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def create(self, wanted: Wanted) -> Row:
        """A new job, or the one that is open already for the same request.

        Raises InvalidRequest where too many wait.
        """
        with self._lock:
            open_ = [job for job in self._jobs.values() if job.state in OPEN]
            for job in open_:
                if job.wanted == wanted:
                    return job.row()
            if len(open_) > MOST_WAITING:
                raise InvalidRequest(
                    f"{len(open_)} certificates are waiting already",
                    hint="cancel some of them, or wait",
                )
            job = Job(secrets.token_hex(8), wanted, self._seconds.get(_likeness(wanted)))
            self._jobs[job.id] = job
            self._forget()
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, daemon=True)
                self._worker.start()
            self._queue.put(job)
            return job.row()

    def rows(self) -> list[Row]:
        """Every job, the newest first."""
        with self._lock:
            return [job.row() for job in reversed(self._jobs.values())]

    def find(self, name: str) -> Row:
        """One job; raises InvalidRequest for none."""
        with self._lock:
            return self._find(name).row()

    def result(self, name: str) -> bytes:
        """A finished job's answer as JSON; raises InvalidRequest where there is none."""
        with self._lock:
            job = self._find(name)
            if job.state != "done":
                raise InvalidRequest(f"the certificate `{name}` is {job.state}: it has no result")
            return job.result

    def remove(self, name: str) -> Row:
        """Cancel an open job, whose processes are gone on return; forget a finished one."""
        with self._lock:
            job = self._find(name)
            if job.state not in OPEN:
                del self._jobs[name]
                return job.row()
            job.state, job.phase, job.ended = "cancelled", "", time.monotonic()
            child = job.child
            if child is not None:
                _kill(child)
        if child is not None:
            child.wait()
        return job.row()

    def close(self) -> None:
        """Cancel what is open; for the server's end."""
        for row in self.rows():
            if row.state in OPEN:
                with contextlib.suppress(InvalidRequest):
                    self.remove(row.id)

    def _find(self, name: str) -> Job:
        if name not in self._jobs:
            raise InvalidRequest(
                f"there is no certificate `{name}` here",
                hint="the server keeps the newest; certify again",
            )
        return self._jobs[name]

    def _forget(self) -> None:
        finished = [job.id for job in self._jobs.values() if job.state not in OPEN]
        for name in finished[: max(0, len(finished) - MOST_FINISHED)]:
            del self._jobs[name]

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            with self._lock:
                if job.state != "waiting":
                    continue
                job.child = child = _start()
                job.state, job.phase, job.began = "running", "starting", time.monotonic()
            self._follow(job, child)

    def _follow(self, job: Job, child: subprocess.Popen[str]) -> None:
        """Read what the child says until it ends; a cancelled job stays cancelled."""
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=_read_lines, args=(child.stderr, errors), daemon=True)
        reader.start()
        message: dict[str, Any] = {}
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(job.wanted).decode() + "\n")
            child.stdin.flush()
        for line in child.stdout:
            message = msgspec.json.decode(line)
            with self._lock:
                if "phase" in message and job.state == "running":
                    job.phase = message["phase"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING)
        _kill(child)  # nothing that it started may outlive it
        code = child.wait()
        reader.join(1)
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        with self._lock:
            job.child = None
            if job.state == "running":
                self._finish(job, message, code, errors)

    def _finish(self, job: Job, message: dict[str, Any], code: int, errors: list[str]) -> None:
        job.phase, job.ended = "", time.monotonic()
        if "answer" in message:
            job.state, job.result = "done", msgspec.json.encode(message["answer"])
            job.verdict = message["answer"]["certificate"]["memory"]["verdict"]
            self._seconds[_likeness(job.wanted)] = job.ended - job.began
            return
        job.state, job.failure = "failed", message
        if "error" not in message:
            words = "".join(errors[-LAST_LINES:]).strip()
            job.failure = {
                "error": f"the certifying process ended with code {code}: {words}",
                "hint": "please report this; `memfit predict` gives the closed form meanwhile",
                "exit_code": 1,
            }


def _likeness(wanted: Wanted) -> tuple[str, ...]:
    """What mostly decides how long a certificate takes."""
    keys = ("model", "hardware.device", "hardware.count", "hardware.nodes", "method")
    return tuple(wanted.query.get(key, "") for key in keys)


def _read_lines(stream: TextIO, lines: list[str]) -> None:
    with stream:
        lines.extend(stream)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "memfit.ui.job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace",
        env=child_environment(), start_new_session=True,
    )  # fmt: skip


def _kill(child: subprocess.Popen[str]) -> None:
    """The process and all that it started, which share its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
