"""What can go wrong around a run: two at once, Ctrl-C, no memory left."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from msgspec.structs import replace

from memfit.core import units
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records import write_json
from memfit.records.results import OutOfMemory
from memfit.train.run.oom_report import dump_snapshot

LOCK = ".lock"
SHORTAGE = "out_of_memory.json"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run folder; the lock goes with the process, however it ends.

    Raises InvalidRequest when another process trains there, or the folder cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        # what another user put there under this name is neither followed nor emptied
        held = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and (run / LOCK).is_symlink():
            raise InvalidRequest(
                f"`{run / LOCK}` is a link to `{os.readlink(run / LOCK)}`, not a lock",
                hint="remove the link",
            ) from None
        raise InvalidRequest(f"cannot write in `{run}`: {error.strerror}") from None
    with os.fdopen(held, "w", closefd=True) as file:
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


Diagnose = Callable[[str], OutOfMemory]  # from the error's first line
Rescue = Callable[[], Path | None]  # the newest complete checkpoint, saved now if it can be


@contextmanager
def explained_out_of_memory(
    run: Path, moment: str, diagnose: Diagnose | None = None, rescue: Rescue | None = None
) -> Iterator[None]:
    """Turn out-of-memory errors into RunFailed, and leave `out_of_memory.json` in the run folder.

    diagnose: looks at what is alive while the failure's frames still hold it.
    rescue: runs once they are gone.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        message = str(error).strip().partition("\n")[0] or "the system gave none"
        found = diagnose(message) if diagnose else None
        snapshot = dump_snapshot(run)
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        saved = rescue() if rescue else None
        hint = _leave(run, found, saved, snapshot)
        raise RunFailed(f"out of memory in {moment}: {message}", hint=hint) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "can't allocate memory" in str(error)
    )


def _leave(run: Path, found: OutOfMemory | None, saved: Path | None, snapshot: str) -> str:
    """Write what was found; returns the hint that names it."""
    parts = []
    if found is not None:
        path = run / SHORTAGE
        made = replace(found, checkpoint=str(saved or ""), snapshot=snapshot)
        try:
            write_json(path, made)
        except OSError as error:
            parts.append(f"what was alive could not be written: {error.strerror}")
        else:
            parts.append(f"`{path}` says what was alive{_first(made)}")
    if saved is not None:
        parts.append(f"`{saved}` is complete and the same command goes on from there")
    parts.append("set `limits.memory` lower to plan again, or stop what else holds memory")
    return "; ".join(parts)


def _first(found: OutOfMemory) -> str:
    above = [row for row in found.components if row.excess > 0]
    if found.certified is None or not above:
        return ""
    row = above[0]
    return (
        f": {row.kind} of {row.owner} held {units.show_bytes(row.excess)} more than certified"
        f" for {found.phase}"
    )
