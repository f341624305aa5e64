"""One JSON array of a file, element by element: no more than one is held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Literal

from memfit.core.units import MIB

MOST = 64 * MIB  # characters of an element: an open quote would take the file into memory
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n\ufeff"
_OPEN = "the array does not end"


class ListError(ValueError):
    """Where an array cannot be read: the number of the element, from 1, and what is wrong."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"element {number}: {problem}")
        self.number, self.problem = number, problem


def find_records(start: str) -> Literal["array", "lines", ""]:
    """How the records stand of which a JSON file's text begins so: in an array, which may be empty,
    or one object a line; "" of any other document."""
    head = start.lstrip(_SPACE)
    if head[:1] == "[" and head[1:].lstrip(_SPACE)[:1] in ("{", "]", ""):
        return "array"
    lines = [line for line in start.split("\n") if line.strip()]
    try:
        several = len(lines) > 1 and isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return ""
    return "lines" if several else ""


def read_list(read: Callable[[int], str]) -> Iterator[str]:
    """The text of each element of an array; read(n): the next n characters, "" at the end.

    Raises ListError for what is no array, an element that is broken or longer than `MOST`, and an
    array that does not end, after the elements before.
    """
    text = _Text(read)
    if text.next_character() != "[":
        raise ListError(0, "the text is no array")
    text.at += 1
    number = 1
    while (character := text.next_character()) != "]":
        if number > 1:
            if character != ",":
                raise ListError(number, "no comma stands before it" if character else _OPEN)
            text.at += 1
        yield text.take_element(number)
        number += 1


class _Text:
    """As much of a text as is needed at a time."""

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read = read
        self._held = ""
        self.at = 0  # in what is held

    def next_character(self) -> str:
        """The next one that is no space, which stays; "" at the end."""
        while True:
            while self.at < len(self._held):
                if self._held[self.at] not in _SPACE:
                    return self._held[self.at]
                self.at += 1
            self._held, self.at = self._read(MIB), 0
            if not self._held:
                return ""

    def take_element(self, number: int) -> str:
        """The text of the element that comes next; raises ListError."""
        size = MIB
        if not self.next_character():
            raise ListError(number, _OPEN)
        while True:
            stop, problem = _find_end(self._held, self.at)
            # the last of what is held may go on, as a number does
            more = "" if stop and stop < len(self._held) else self._read(size)
            if stop and not more:
                element, self.at = self._held[self.at : stop], stop
                return element
            if not more or len(self._held) - self.at > MOST:
                long = f"; it has more than {MOST} characters" if more else ""
                raise ListError(number, (problem or _OPEN) + long)
            self._held, self.at = self._held[self.at :] + more, 0
            size *= 2  # so that what is read again is no more than what is new


def _find_end(text: str, at: int) -> tuple[int, str]:
    """Where the element that begins at `at` ends, 0 where it does not; and what is wrong."""
    try:
        return _DECODER.raw_decode(text, at)[1], ""
    except RecursionError:
        return 0, "it is nested too deeply"
    except ValueError as error:
        return 0, str(error).partition(":")[0]
