"""SHA-256 of data files, and whether they are text: read once, remembered while they do not change.

A file's hash is remembered where all of it is sure: its size, its times of change and its inode are
the same before and after it is read, and it was last changed some seconds before that, so that a
later change has another time. Any difference of those means that it is read.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.core.units import MIB
from memfit.records import write_atomically

SETTLED = 3 * 10**9  # nanoseconds: the coarsest clock of a file system ticks every two seconds
WORTH = 64 * MIB  # bytes of data: less is read in a moment
Stamp = list[int]


class Content(NamedTuple):
    """What a file holds."""

    sha256: str
    problem: str  # why it is not text; empty when it is


class Hashes:
    """The hashes of the files that one name of data stands for."""

    def __init__(self, data: str, cache: Path) -> None:
        name = hashlib.sha256(os.path.abspath(data).encode()).hexdigest()[:32]
        self._file = cache / "hashes" / f"{name}.json"
        self._known: dict[str, tuple[Stamp, str, str]] = {}
        self._found: dict[str, tuple[Stamp, str, str]] = {}
        self._size = 0
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            read = json.loads(self._file.read_text())
            self._known = {path: (list(s), str(h), str(p)) for path, (s, h, p) in read.items()}

    def inspect(self, path: Path, *, text: bool) -> Content:
        """The hash of a file's bytes, and why it is not text where it should be.

        Raises InvalidRequest for a file that cannot be read.
        """
        try:
            stamp, began = _stamp(path), time.time_ns()
            key = f"{path.absolute()}"
            self._size += stamp[2]
            known = self._known.get(key)
            if known is not None and known[0] == stamp:
                self._found[key] = known
                return Content(known[1], known[2])
            found = _read(path, text=text)
            if _stamp(path) == stamp and max(stamp[3:]) < began - SETTLED:
                self._found[key] = (stamp, *found)
        except OSError as error:
            raise InvalidRequest(f"cannot read `{path}`: {error.strerror}") from None
        return found

    def remember(self) -> None:
        """Write down what is sure, where reading it all would take a while."""
        if self._size >= WORTH and self._found != self._known:
            with contextlib.suppress(OSError):  # then they are read at the next start, too
                write_atomically(self._file, json.dumps(self._found).encode())


def _stamp(path: Path) -> Stamp:
    """What differs once a file is changed or replaced."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _read(path: Path, *, text: bool) -> Content:
    digest, problem = hashlib.sha256(), ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        chunk = None
        while chunk != b"":
            chunk = file.read(MIB)
            digest.update(chunk)
            if text and not problem:
                try:
                    decoder.decode(chunk, final=not chunk)  # the last character may be cut
                    problem = "is a binary file" if b"\0" in chunk else ""
                except UnicodeDecodeError as error:
                    byte = error.object[error.start]
                    problem = f"is not UTF-8 text: it holds the byte 0x{byte:02x}"
    return Content(digest.hexdigest(), problem)
