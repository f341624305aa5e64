"""What can go wrong around a run: two at once, Ctrl-C, no memory left."""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memfit.errors import InvalidRequest, RunFailed
from memfit.nouns import write_atomically

LOCK = ".lock"
SNAPSHOT = "memory_snapshot.json"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run folder; the lock goes with the process, however it ends.

    Raises InvalidRequest when another process trains there, or the folder cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK).open("w")
    except OSError as error:
        raise InvalidRequest(f"cannot write in `{run}`: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidRequest(
                f"another process is training in `{run}`",
                hint="wait for it, or choose another folder with `--folder`",
            ) from None
        yield


class Interrupts:
    """Turns the first Ctrl-C (or SIGTERM) into a wish that the loop grants after its step.

    The second one stops at once. Used as a context manager; does nothing outside the main thread,
    where Python delivers no signals.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def explained_out_of_memory(run: Path, where: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors into RunFailed, with the allocator's state in a file."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        path = run / SNAPSHOT
        state: object = []
        if torch.cuda.is_available():
            state = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        write_atomically(path, json.dumps(state, default=str).encode())
        raise RunFailed(
            f"out of memory in {where}: {_first_line(error)}",
            hint=f"the allocator's state is in `{path}`; set `limits.memory` lower to plan again",
        ) from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise RunFailed(
            f"out of memory in {where}: {_first_line(error) or 'the system gave none'}",
            hint="other programs hold it, or the limit is above what is free; "
            "set `limits.memory` lower to plan again",
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
