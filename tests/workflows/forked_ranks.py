"""torch's launcher starts the ranks of a run as forks of a process that has all libraries.

Each is a process with its own environment, session and streams as before; only its imports are not
made again. test_compared_on_ranks.py starts ranks as a user's machine does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

from forked import fork
from memfit.core.system.processes import PARENT

COMMAND = (sys.executable, "-m", "memfit.workflows.launch_ranks")


def be_rank(words: list[str], environment: dict[str, str], streams: dict[int, str]) -> None:
    from memfit.workflows import launch_ranks

    os.setsid()
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment | {PARENT: str(os.getppid())})
    if launch_ranks.main(words):
        raise AssertionError


class Forked:
    """What the launcher asks of a process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        return self._process.exitcode


@contextmanager
def ranks_forked() -> Iterator[dict[int, int]]:
    """The newest process of each rank."""
    found: dict[int, int] = {}

    def start(handler: Any, words: tuple[str, ...], environment: Mapping[str, str]) -> Forked:
        assert words[:3] == COMMAND
        files = {1: handler._stdout, 2: handler._stderr}
        streams = {number: file.name for number, file in files.items() if file}
        process = fork(be_rank, list(words[3:]), dict(environment), streams)
        found[int(environment["RANK"])] = process.pid
        return Forked(process)

    with patch.object(SubprocessHandler, "_popen", start):
        yield found
