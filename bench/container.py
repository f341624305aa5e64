"""Commands in a container's memory: a control group with a limit, and what they hold meanwhile.

The group is version 2's, or version 1's memory controller, below the group of this process. Where
neither can be made, the command runs without a limit and is watched all the same.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.005  # seconds between two looks
ROOT = Path("/sys/fs/cgroup")


class Held(NamedTuple):
    """How a command ended, and the most that it held at once with all of its children."""

    code: int
    anonymous: int  # bytes: anonymous pages of all processes
    charged: int | None  # bytes that the group was charged, with files' pages; None without one
    kills: int | None
    group: str  # which kind of group held it; "none"
    stderr: str


class Group:
    """A control group of its own, removed at the end; raises OSError where none can be made."""

    def __init__(self, limit: int) -> None:
        self.version, self.path = self._make()
        self._write("memory.max" if self.version == 2 else "memory.limit_in_bytes", limit)

    def _make(self) -> tuple[int, Path]:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        name = f"memfit-bench-{os.getpid()}"
        for _, controllers, own in lines:
            if controllers == "memory":
                path = ROOT / "memory" / own.lstrip("/") / name
                path.mkdir()
                return 1, path
        own = next(own for _, controllers, own in lines if not controllers)
        path = ROOT / own.lstrip("/") / name
        path.mkdir()
        if not (path / "memory.max").exists():
            path.rmdir()
            raise OSError("the memory controller is not there")
        return 2, path

    def _write(self, file: str, value: int) -> None:
        (self.path / file).write_text(str(value))

    def join(self) -> None:
        """Put this process into the group."""
        self._write("cgroup.procs", os.getpid())

    def _stat(self, file: str) -> dict[str, int]:
        rows = (self.path / file).read_text().split("\n")
        return {key: int(value) for key, value in (row.split() for row in rows if row)}

    @property
    def anonymous(self) -> int:
        """Bytes now."""
        return self._stat("memory.stat")["anon" if self.version == 2 else "total_rss"]

    @property
    def charged(self) -> int:
        """The most bytes so far."""
        file = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        return int((self.path / file).read_text())

    @property
    def kills(self) -> int:
        """Processes that were ended because memory ran out."""
        file = "memory.events" if self.version == 2 else "memory.oom_control"
        return self._stat(file)["oom_kill"]

    def remove(self) -> None:
        """Remove the group, which must be empty by now."""
        self.path.rmdir()


def make_group(limit: int) -> Group | None:
    """A group with this limit in bytes; None where none can be made here."""
    try:
        return Group(limit)
    except (OSError, StopIteration):
        return None


def run_within(command: Sequence[str], limit: int) -> Held:
    """Run a command under a limit in bytes and watch what it holds."""
    group = make_group(limit)
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=group.join if group else None,
    )  # fmt: skip
    peak, lines = 0, []
    assert child.stderr is not None
    os.set_blocking(child.stderr.fileno(), False)
    while child.poll() is None:
        peak = max(peak, group.anonymous if group else sum_tree(child.pid))
        lines += child.stderr.readlines()
        time.sleep(INTERVAL)
    lines += child.stderr.readlines()
    try:
        return Held(
            code=child.returncode, anonymous=peak, charged=group.charged if group else None,
            kills=group.kills if group else None, stderr="".join(lines),
            group=f"cgroup v{group.version}" if group else "none",
        )  # fmt: skip
    finally:
        child.stderr.close()
        if group is not None:
            group.remove()


def sum_tree(pid: int) -> int:
    """Anonymous bytes of a process and all of its descendants."""
    total, waiting = 0, [pid]
    while waiting:
        home = Path("/proc") / str(waiting.pop())
        try:
            status = (home / "status").read_text()
            for task in (home / "task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ProcessLookupError):
            continue  # it has ended
        rows = (row.split() for row in status.splitlines())
        total += sum(int(row[1]) * 1024 for row in rows if row[0] == "RssAnon:")
    return total
