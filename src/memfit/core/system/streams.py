"""Output that cannot be written: a closed pipe or a full disk ends no work that is under way.

A reader may go (`memfit train … | head -4`), a terminal may close, the disk behind a redirection
may fill. A `Guarded` stream keeps the first error, drops what follows and lets the work go on; the
command line says the error at the end, where it is one.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.ECONNRESET)  # the reader has seen enough
CLOSED = (OSError, ValueError)  # a closed stream is a ValueError


# what steers a terminal, breaks a line or turns its direction: C0 but tab, DEL, C1, separators
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def in_one_line(text: str) -> str:
    """The text without what steers a terminal or ends a line, each shown as U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def in_lines(text: str) -> str:
    """The same of a text of several lines."""
    return "\n".join(map(in_one_line, text.split("\n")))


class Guarded:
    """A text stream whose writing never raises; `error` is what first went wrong."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: Any) -> int:
        """Write, or drop the text where an earlier or this writing fails."""
        if not isinstance(text, str):  # click asks so whether a stream takes bytes
            raise TypeError(f"write() takes text, not {type(text).__name__}")
        if self.error is None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(_encodable(text, self._stream))
            except CLOSED as error:
                self._fail(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or drop what is left."""
        if self.error is None:
            try:
                self._stream.flush()
            except CLOSED as error:
                self._fail(error)

    @property
    def is_lost(self) -> bool:
        """Whether something was lost that a reader still waits for."""
        return self.error is not None and self.error.errno not in GONE

    def _fail(self, error: Exception) -> None:
        self.error = error if isinstance(error, OSError) else OSError(errno.EBADF, str(error))
        with suppress(OSError, ValueError, AttributeError):  # Python flushes once more at its end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard(stream: Any) -> Guarded:
    """The stream, guarded once; of a stream that was closed before the process began, nowhere."""
    if isinstance(stream, Guarded):
        return stream
    return Guarded(cast(TextIO, stream or open(os.devnull, "w", encoding="utf-8")))


@contextmanager
def guarded_output() -> Iterator[tuple[Guarded, Guarded]]:
    """stdout and stderr are guarded meanwhile."""
    before = sys.stdout, sys.stderr
    out, err = guard(before[0]), guard(before[1])
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = before


def open_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr an empty one.

    The next file that is opened would take the number, and what is printed would go into it.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number, which is this one


def _encodable(text: str, stream: TextIO) -> str:
    """Return the text with `?` for each character that the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def answers_alone() -> TextIO:
    """This process's stdout, to which only the caller writes from now on: all else goes to stderr.

    For a process whose output another one reads, and whose libraries print.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
