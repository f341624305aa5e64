"""What a process on a CPU holds of the machine's memory beside its tensors: anonymous pages.

A limit on a CPU is the limit of a container, which counts pages: those of the interpreter and of
imported libraries, of tensors, and whatever the C library's allocator does not give back.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable

from memfit.allocator.heap import BELOW, keeps_freed
from memfit.core.system.memory import read_anonymous as read_anonymous
from memfit.core.units import GIB, KIB
from memfit.records.recipe import Recipe

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
AT_ONCE = 128 * KIB  # glibc's own first threshold, which it raises where none is named
NEVER = 2 * GIB - 1  # the end of the heap is not given back: the largest C int
PAUSE = 1.0  # seconds between two of giving back what is free
INTERVAL = 0.02  # seconds between two looks at the process
# what a run has imported when its first tensor is made
TRAINING = ("memfit.train.run.loop", "memfit.train.data.tokenizer")
ADAPTERS = "peft"  # and, with adapters, this


def settle_heap(recipe: Recipe) -> bool:
    """Make glibc keep or give back freed tensors of a CPU, as the recipe says; whether it does."""
    if keeps_freed(recipe.allocator):
        return _set(M_MMAP_THRESHOLD, BELOW) and _set(M_TRIM_THRESHOLD, NEVER)
    return give_back_freed()


def give_back_freed() -> bool:
    """Make glibc return the memory of every freed tensor to the system; whether it does.

    Each allocation of 128 KiB or more is then mapped on its own and unmapped when it is freed, so
    that a process holds its live tensors and no more. The price: the kernel clears the pages of
    every new tensor.
    """
    return _set(M_TRIM_THRESHOLD, AT_ONCE) and _set(M_MMAP_THRESHOLD, AT_ONCE)


def _set(parameter: int, value: int) -> bool:
    found = _glibc("mallopt")
    return found is not None and bool(found(parameter, value))


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc; None where the C library is another one."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    return found


class Resident:
    """The highest anonymous bytes of this process while it is open, looked up all the time.

    most: bytes beyond which the pages of freed blocks go back to the system, so that a heap that
    keeps them stays within what is certified.
    """

    def __init__(self, interval: float = INTERVAL, *, most: int | None = None) -> None:
        self.peak = read_anonymous() or 0
        self._most, self._trim, self._trimmed = most, _glibc("malloc_trim"), -math.inf
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Resident:
        if self.peak:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.note()

    def note(self) -> int:
        """The highest so far, this instant included."""
        now = read_anonymous() or 0
        self.peak = max(self.peak, now)
        if self._most is not None and now > self._most:
            self._give_back()
        return self.peak

    def _give_back(self) -> None:
        """At most once a second: where tensors themselves are too large, it would help nothing."""
        if self._trim is not None and time.monotonic() - self._trimmed > PAUSE:
            self._trim(0)
            self._trimmed = time.monotonic()

    def _look(self) -> None:
        while not self._stop.wait(self._interval):
            self.note()
