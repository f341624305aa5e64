"""A process that imports what it needs while this one still works out what to ask of it."""

from __future__ import annotations

import atexit
import subprocess
import sys

from memfit.core.system.processes import child_environment

AHEAD = "--ahead"  # an argument: import what every order needs before any order is read
_started: dict[str, subprocess.Popen[str]] = {}  # by module, each until it is taken


def start_ahead(module: str) -> None:
    """Start `python -m module --ahead`, which reads its orders on stdin when they are known.

    Where it is never taken it ends with this process. One that cannot be started is none.
    """
    if module not in _started:
        try:
            _started[module] = _start(module, AHEAD)
        except OSError:  # no memory or no room for one more process: it is started when it is due
            return
        atexit.register(_end, _started[module])


def take(module: str) -> subprocess.Popen[str]:
    """The process of this module that was started ahead, else one that is started now."""
    child = _started.pop(module, None)
    return child if child is not None and child.poll() is None else _start(module)


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=child_environment(),
    )  # fmt: skip


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.kill()
        child.communicate()
