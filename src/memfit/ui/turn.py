"""One question to the planner at a time, and a limit to how long others wait for their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from memfit.core.errors import Error

HINT = "ask again when the answers that are being worked out are there"


class Busy(Error):
    """Other questions are being answered, and this one has waited long enough."""


class Turn:
    """The planner keeps what it has worked out in tables of the process, so that two questions at
    once would mix them. seconds: how long a question waits; most: how many may wait."""

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most = seconds, most
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(
            most + 1
        )  # those that wait, and the one that is asked

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises Busy where too many wait already, and where the turn does not come in time."""
        if not self._room.acquire(blocking=False):
            raise Busy(f"{self.most} questions are waiting for the planner already", hint=HINT)
        try:
            if not self._lock.acquire(timeout=self.seconds):
                raise Busy(
                    f"the planner has been busy with other questions for {self.seconds:g} s",
                    hint=HINT,
                )
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._room.release()
