"""Connections on which nobody asks: they are closed, so that they hold no descriptor for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # in which a request is to come whole; this machine's own page takes milliseconds


class Patient(H11Protocol):
    """uvicorn's protocol, which by itself waits for the rest of a request without an end."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request from now on."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest, where there is one; more bytes give no more time."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        if self._waiting is not None:
            self._waiting.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if not self._is_incomplete():
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
        elif self._waiting is None:
            self._waiting = self.loop.call_later(SECONDS, self._give_up)

    def _is_incomplete(self) -> bool:
        """Whether a request has not begun, or not come whole."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def _give_up(self) -> None:
        self._waiting = None
        if self._is_incomplete() and not self.transport.is_closing():
            self.transport.close()
