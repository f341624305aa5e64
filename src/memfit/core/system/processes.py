"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import sys
import threading
import time

PARENT = "MEMFIT_PARENT_PID"  # in the environment of a process that is to end with its parent
_watching = threading.Lock()  # held once this process watches
# how C, Python, the loader and torch say that the system gave no memory
NO_MEMORY = (
    "MemoryError", "Cannot allocate memory", "can't allocate memory", "failed to map segment",
    "std::bad_alloc",
)  # fmt: skip
INTERVAL = 0.5  # seconds between two looks


def is_shortage(text: str) -> bool:
    """Whether an error's text says that memory ran out."""
    return any(words in text for words in NO_MEMORY)


def name_parent() -> dict[str, str]:
    """What the environment of a child says, so that `end_with_parent` knows its parent."""
    return {PARENT: str(os.getpid())}


def child_environment() -> dict[str, str]:
    """Of a process that imports what this one would, and sees none of this machine's GPUs."""
    return {
        **os.environ,
        **name_parent(),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def end_with_parent(*, code: int = 1) -> None:
    """End this process at once, with `code`, when the process that started it is gone.

    Nothing is saved on the way: whatever this process writes is whole at every moment. A process
    that was started without `name_parent` watches whoever is its parent now.
    """
    if not _watching.acquire(blocking=False):
        return
    stated = os.environ.pop(PARENT, "")  # not for the children of this one
    _watch(int(stated) if stated.isdecimal() else os.getppid(), code)


def end_fork_with(parent: int, *, code: int = 1) -> None:
    """`end_with_parent` for a fork, in which no thread of its parent's goes on."""
    _watch(parent, code)


def _watch(parent: int, code: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os._exit(code)

    threading.Thread(target=watch, name="parent", daemon=True).start()
