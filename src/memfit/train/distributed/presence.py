"""A connection between the first rank and each other one, whose end says that a process is gone.

A collective of gloo's fails where the process at its other end is gone. Waiting at torch's store
while groups are made does not, nor does NCCL between machines: there a rank would wait for the
others' whole `TIMEOUT`. Launchers end such ranks; srun does so only with `--kill-on-bad-exit`.

No message is sent but a word at the end. A process that hangs, or is stopped, is not gone.
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from typing import Any

from memfit.core.errors import Error, RunFailed

# how a rank leaves: its work is done; with an error that it explains, as each may for itself; or it
# knows of one that is gone, as is whoever leaves without a word
DONE, FAILED, GONE = b"d", b"f", b"g"
NOTICE = 3.0  # seconds that a rank has to say itself what the loss of another did to it
LEAVING = 60.0  # seconds that it has to save and end, once another has left with an error
COMING = 60.0  # seconds for all to be here, once all have been at the store
LOOK = 0.5  # seconds from one look at whether this rank has left to the next


class NotHere(RunFailed):
    """A rank that was at the store does not come, or cannot be reached."""


class Watch:
    """Looks at the connections from a thread of its own, until this rank leaves."""

    def __init__(self, links: dict[int, socket.socket], end: Callable[[int], object]) -> None:
        """links: rank -> connection. end: ends this process, because of that rank."""
        self._links, self._end = links, end
        self._left = threading.Event()
        threading.Thread(target=self._look, name="ranks", daemon=True).start()

    def leave(self, word: bytes) -> None:
        """Say how this rank leaves; then nothing ends it any more."""
        self._tell(word)
        self._left.set()

    def _tell(self, word: bytes) -> None:
        for link in self._links.values():
            with suppress(OSError):
                link.send(word)

    def _look(self) -> None:
        limit, lost = math.inf, 0
        with selectors.DefaultSelector() as waiting, ExitStack() as opened:
            for rank, link in self._links.items():
                opened.enter_context(link)
                waiting.register(link, selectors.EVENT_READ, rank)
            while not self._left.is_set() and (waiting.get_map() or limit < math.inf):
                now = time.monotonic()
                if now >= limit:
                    self._end(lost)
                    return
                for key, _ in waiting.select(min(LOOK, limit - now)):
                    waiting.unregister(key.fileobj)
                    seconds = self._hear(_read(self._links[key.data]))
                    if now + seconds < limit:
                        limit, lost = now + seconds, key.data

    def _hear(self, word: bytes) -> float:
        """Seconds that this rank may go on for after another's last word."""
        if word == GONE:  # so that all notice at once, and not one after the other
            self._tell(GONE)
        return {DONE: math.inf, FAILED: LEAVING}.get(word, NOTICE)


def _read(link: socket.socket) -> bytes:
    """The word of a connection on which something has come; GONE where it has ended without."""
    try:
        return link.recv(1) or GONE
    except OSError:
        return GONE


@contextmanager
def watched(rank: int, size: int, store: Any, end: Callable[[int], object]) -> Iterator[None]:
    """Call `end` from another thread when another rank's process is gone, until this one leaves.

    store: torch's, to which all ranks have come. end: is called with the rank that is gone (0 on
    other ranks, where the first one may only know of another), `NOTICE` seconds after the loss, and
    `LEAVING` seconds after another rank left with an error that it explains. Raises NotHere, and
    torch's errors of the store.
    """
    links = _wait_for_others(size, store) if rank == 0 else {0: _come(rank, store)}
    watch = Watch(links, end)
    try:
        yield
    except Error:
        watch.leave(FAILED)
        raise
    except BaseException:
        watch.leave(GONE)
        raise
    watch.leave(DONE)


def _wait_for_others(size: int, store: Any) -> dict[int, socket.socket]:
    word = secrets.token_hex(16)  # whoever else may connect does not know it
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + COMING
    with _listen(size) as door:
        store.set("presence", f"{door.getsockname()[1]} {word}")
        while len(found) < size - 1:
            door.settimeout(max(0.001, until - time.monotonic()))
            try:
                link, _ = door.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(found))
                raise NotHere(f"ranks {missing} did not come within {COMING:g} s") from None
            link.settimeout(COMING)
            line = _read_line(link).split()
            if len(line) == 2 and line[0] == word and line[1].isdecimal():
                found[int(line[1])] = link
            else:
                link.close()
    return found


def _listen(size: int) -> socket.socket:
    """On the loopback address where ranks of one machine meet there, else on every network."""
    family, *_, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], 0, type=socket.SOCK_STREAM)[0]
    address = str(place[0])
    if ip_address(address).is_loopback:
        return socket.create_server((address, 0), family=family, backlog=size)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=size, dualstack_ipv6=True
            )
        except OSError:  # the kernel knows no such address
            pass
    return socket.create_server(("", 0), backlog=size)


def _come(rank: int, store: Any) -> socket.socket:
    port, word = store.get("presence").decode().split()
    place = os.environ["MASTER_ADDR"], int(port)
    try:
        link = socket.create_connection(place, timeout=COMING)
        link.sendall(f"{word} {rank}\n".encode())
    except OSError as error:
        address = ":".join(map(str, place))
        raise NotHere(f"rank 0 cannot be reached at `{address}`: {error}") from None
    return link


def _read_line(link: socket.socket) -> str:
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 64 and (more := link.recv(64)):
            line += more
    return line.decode(errors="replace")
