"""What a process on a CPU holds of the machine's memory beside its tensors: anonymous pages.

A limit on a CPU is the limit of a container, which counts pages: those of the interpreter and of
imported libraries, of tensors, and whatever the C library's allocator does not give back.
"""

from __future__ import annotations

import ctypes
import threading

from memfit.core.system.memory import read_anonymous as read_anonymous
from memfit.core.units import KIB

# mallopt(3): glibc's own first threshold; naming it stops glibc from raising it to 32 MiB, above
# which freed tensors would stay in its heap
THRESHOLDS = {"M_TRIM_THRESHOLD": (-1, 128 * KIB), "M_MMAP_THRESHOLD": (-3, 128 * KIB)}
INTERVAL = 0.02  # seconds between two looks at the process
# what a run has imported when its first tensor is made
TRAINING = ("memfit.train.run.loop", "memfit.train.data.tokenizer")
ADAPTERS = "peft"  # and, with adapters, this


def give_back_freed() -> bool:
    """Make glibc return the memory of every freed tensor to the system; whether it does.

    Each allocation of 128 KiB or more is then mapped on its own and unmapped when it is freed, so
    that a process holds its live tensors and no more. The price: the kernel clears the pages of
    every new tensor.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return all([mallopt(number, value) for number, value in THRESHOLDS.values()])


class Resident:
    """The highest anonymous bytes of this process while it is open, looked up all the time."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.peak = read_anonymous() or 0
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
        self.peak = max(self.peak, read_anonymous() or 0)
        return self.peak

    def _look(self) -> None:
        while not self._stop.wait(self._interval):
            self.note()
