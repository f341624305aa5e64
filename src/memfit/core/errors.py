"""The exception tree. One clear sentence naming both values, then a `hint:` that says what to do.

    Error                       exit code
      InvalidRequest            2   a file, flag or value of the user's is wrong
        UnknownName             2   a name that no catalogue or registry holds (did-you-mean)
        MemoryUnknown           2   a step whose bytes memfit does not describe; its time it may
        TimeUnknown             2   a step whose seconds rest on a figure that nobody has stated
      DoesNotFit                3   needs more memory, time or money than the limit
      NotCertified              4   a certificate is missing, stale or could not be made
      RunFailed                 5   training began and could not finish
Anything else that escapes is a bug of memfit's: exit code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """A condition that memfit explains to the user; `str()` is the message with its hint."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class InvalidRequest(Error):
    """Something the user wrote cannot be understood or can never run."""


class UnknownName(InvalidRequest):
    """A name that nothing carries; the hint offers the nearest ones."""

    near: str = ""

    def __init__(self, what: str, name: str, known: Iterable[str], *, see: str = "") -> None:
        self.near = near = did_you_mean(name, known)
        hint = f"did you mean {near}?" if near else see
        if near and see:
            hint = f"{hint} ({see})"
        super().__init__(f"unknown {what}: `{shorten_name(name)}`", hint=hint)


class MemoryUnknown(InvalidRequest):
    """Another framework's step whose bytes memfit does not describe; its time it may."""


class TimeUnknown(InvalidRequest):
    """A step whose seconds memfit cannot tell: a speed or a link that nobody has stated."""


class DoesNotFit(Error):
    """More memory (or time, or money) is needed than the limit allows."""

    exit_code = 3


class NotCertified(Error):
    """No valid certificate: missing, made for another recipe or library, or impossible here."""

    exit_code = 4


class RunFailed(Error):
    """A run that had begun could not finish; what it had saved is intact."""

    exit_code = 5


LONGEST = 200  # characters of a name that an error repeats


def shorten_name(name: str) -> str:
    """A name as an error repeats it."""
    return name if len(name) <= LONGEST else f"{name[:40]}…` of {len(name):,} characters: `…"


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """The nearest known names in backticks, joined by "or"; empty when none is near."""
    if len(name) > LONGEST:  # no name is like it
        return ""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.6)
    if not near:  # a fragment ("h100") is near every name that contains it
        near = [k for k in by_lower if name.lower() in k][:limit]
    return " or ".join(f"`{by_lower[k]}`" for k in near)
