"""What processes hold of this machine's memory, and what is free of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memfit.core.units import KIB

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


def read_anonymous(process: int | None = None) -> int | None:
    """Anonymous resident bytes of a process, of this one without a number; None where the system
    does not say (not Linux)."""
    return _read_line(PROCESSES / str(process or "self") / "status", "RssAnon")


def find_free(limit: int | None = None) -> int:
    """Bytes that more processes may hold beside this one and its parent.

    limit: of all processes of a command; None: there is none but the machine's and its container's.
    """
    found = [_available(), *_left_of_groups()]
    if limit is not None:
        found.append(limit - sum(read_anonymous(p) or 0 for p in (None, os.getppid())))
    return max(0, min(found))


def _available() -> int:
    known = _read_line(PROCESSES / "meminfo", "MemAvailable")
    if known is not None:
        return known
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return sys.maxsize


def _left_of_groups() -> list[int]:
    """What is left of this process's control group, version 2's or 1's; nothing without a limit."""
    try:
        lines = [line.split(":", 2) for line in (PROCESSES / "self/cgroup").read_text().split("\n")]
        names = [(kinds, own.lstrip("/")) for _, kinds, own in (x for x in lines if len(x) == 3)]
    except OSError:
        return []
    left = []
    for kinds, own in names:
        if kinds == "":
            folder, most, now = GROUPS / own, "memory.max", "memory.current"
        elif kinds == "memory":
            folder, most = GROUPS / "memory" / own, "memory.limit_in_bytes"
            now = "memory.usage_in_bytes"
        else:
            continue
        for group in (folder, *folder.parents):  # a group above may bind, too
            if not group.is_relative_to(GROUPS):
                break
            try:
                left.append(int((group / most).read_text()) - int((group / now).read_text()))
            except (OSError, ValueError):  # none here, or "max"
                continue
    return left


def _read_line(file: Path, name: str) -> int | None:
    """A line of the kernel's tables, which has KiB."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * KIB
    except (OSError, ValueError):
        pass
    return None
