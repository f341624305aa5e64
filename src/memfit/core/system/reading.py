"""Bounded readers of text, JSON and YAML that somebody else may have written.

A file may be damaged, endless or made to harm. What is read has a bound on its bytes, its depth,
the values that its aliases stand for and the digits of its numbers, and every failure is an
InvalidRequest that names the file. All readers of the project go through here.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.units import MIB

MOST_BYTES = 64 * MIB  # of a file that is read whole
MOST_YAML = 64 * 1024  # characters: its reader takes two seconds for so many
DEPTH = 60  # containers within each other
EXPANDED = 4_000_000  # values and characters that a document stands for, its aliases written out
DIGITS = 40  # of a whole number; the largest that is written anywhere is 1e30
LONGEST_NAME = 4096  # characters of a path, as Linux has it
SHOWN = 60  # characters of a wrong value that an error repeats
NAMED = 300  # characters of a file's name


def shorten(value: object, most: int = SHOWN) -> str:
    """The value as an error repeats it: its beginning, in one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**DIGITS:
        return f"a number of more than {DIGITS} digits"
    try:
        text = str(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"


def is_file(path: Path) -> bool:
    """Whether it is a file; False also of a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def show(value: object) -> str:
    """A value as Python writes it, as far as an error repeats it."""
    try:
        return shorten(repr(value))
    except ValueError:  # a number of more digits than Python writes
        return shorten(value)


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; False also of a name that none can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether it is a folder; False also of a name that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, *, hint: str = "", most: int = MOST_BYTES) -> bytes:
    """A regular file's content. Raises InvalidRequest: none, a folder, a device, too large."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode):
                raise InvalidRequest(f"`{shorten(path, NAMED)}` is no regular file", hint=hint)
            if kind.st_size > most:
                raise InvalidRequest(
                    f"`{shorten(path, NAMED)}` has {kind.st_size} bytes, and {most} are the"
                    " most that is read of such a file",
                    hint=hint,
                )
            return file.read(most + 1)[:most]
    except OSError as error:
        raise InvalidRequest(
            f"cannot read `{shorten(path, NAMED)}`: {error.strerror}", hint=hint
        ) from None
    except ValueError:  # a zero in the name
        raise InvalidRequest(f"`{shorten(path, NAMED)}` is no name of a file", hint=hint) from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, as for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_text(path: Path, *, hint: str = "", most: int = MOST_BYTES) -> str:
    """A file's text; raises InvalidRequest also where it is not UTF-8."""
    try:
        return read_bytes(path, hint=hint, most=most).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"`{shorten(path, NAMED)}` is not a text file", hint=hint or "it must be in UTF-8"
        ) from None


def parse_json(text: str | bytes, *, source: str, hint: str = "") -> Any:
    """One JSON document, in which NaN and Infinity may stand; raises InvalidRequest.

    where: what it is, as `the file x`; an error names it.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise InvalidRequest(f"{source} nests its values too deeply to be read") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{source} is not a text file", hint=hint) from None
    except ValueError as error:
        raise InvalidRequest(f"{source} is not JSON: {_first(error)}", hint=hint) from None
    check_data(data, source=source)
    return data


def read_json_file(path: Path, *, hint: str = "", most: int = MOST_BYTES) -> Any:
    """One JSON document of a file; see `parse_json`."""
    content = read_bytes(path, hint=hint, most=most)
    return parse_json(content, source=f"`{shorten(path, NAMED)}`", hint=hint)


def read_json_table(path: Path, *, hint: str = "", most: int = MOST_BYTES) -> dict[str, Any]:
    """The same of a file that holds keys with values."""
    data = read_json_file(path, hint=hint, most=most)
    if not isinstance(data, dict):
        raise InvalidRequest(
            f"`{shorten(path, NAMED)}` holds {name_kind(data)}, not keys with values"
        )
    return data


def name_kind(value: object) -> str:
    """What a document holds, in words."""
    names = {dict: "keys with values", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "nothing" if value is None else f"a {type(value).__name__}")


def parse_yaml(text: str, *, source: str, version: str = "1.2") -> Any:
    """One YAML document as plain data; raises InvalidRequest with line and column.

    version: of YAML, where the text says none; in 1.1 `yes` and `off` are booleans.
    """
    from ruamel.yaml import YAML  # 20 ms that a plan by flags does not need
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MantissaNoDotYAML1_1Warning, MarkedYAMLError, YAMLError

    if len(text) > MOST_YAML:
        raise InvalidRequest(f"{source} has {len(text)} characters of YAML, more than {MOST_YAML}")
    if _brackets(text) > DEPTH:  # its reader's time grows with their square
        raise InvalidRequest(
            f"{source} nests its values more than {DEPTH} deep", hint="write it flatter"
        )
    try:
        yaml = YAML(typ="safe", pure=True)
        yaml.version = version
        with warnings.catch_warnings():  # that 1.1 would have a dot in 1e-4
            warnings.simplefilter("ignore", MantissaNoDotYAML1_1Warning)
            data = yaml.load(text)
    except RecursionError:
        raise InvalidRequest(f"{source} nests its keys too deeply to be read") from None
    except MarkedYAMLError as error:
        mark, begun = error.problem_mark, error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        known = "in YAML spaces indent, and a value that holds `: ` stands in quotes"
        hint = f"{error.context}, begun in line {begun.line + 1}" if begun else known
        if isinstance(error, DuplicateKeyError):
            hint = "keep one of the two"
        problem = error.problem or error.context or "is not YAML"
        raise InvalidRequest(f"{source}{place}: {shorten(problem, 200)}", hint=hint) from None
    except YAMLError as error:
        raise InvalidRequest(f"{source} is not YAML: {_first(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        # a tag, a date or a number whose text its constructor cannot take
        raise InvalidRequest(
            f"{source} holds a value that is none: {_first(error)}",
            hint="a text that looks like a date or a number stands in quotes",
        ) from None
    check_data(data, source=source, most=EXPANDED)
    return data


_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|#[^\n]*|[^\[\]{}"\'#]+')


def _brackets(text: str) -> int:
    """How many brackets are open at once, outside quotes and comments."""
    depth = most = 0
    for bracket in _QUOTED.sub("", text):
        if bracket in "[{":
            depth += 1
            most = max(most, depth)
        elif bracket in "]}":
            depth = max(0, depth - 1)
    return most


def check_data(data: Any, *, source: str, most: int = sys.maxsize) -> None:
    """Raise InvalidRequest for plain data that is too deep, too much with its aliases written out,
    has a number of too many digits, or holds what neither JSON nor a request knows.

    most: values and characters that it may stand for."""
    _Check(source, most).size_of(data, 0)


class _Check:
    """The walk of `check_data`: each container once, however many aliases name it."""

    def __init__(self, source: str, most: int) -> None:
        self._source, self._most = source, most
        self._sizes: dict[int, int] = {}  # of containers, by identity; 0: being looked at

    def size_of(self, value: Any, depth: int) -> int:
        """Values and characters that it stands for."""
        if isinstance(value, str):
            return 1 + self._text(value)
        if isinstance(value, dict | list | tuple):
            return self._container(value, depth)
        if isinstance(value, int) and abs(value) >= 10**DIGITS:
            raise InvalidRequest(
                f"{self._source} holds a number of more than {DIGITS} digits",
                hint="write it shorter",
            )
        if value is None or isinstance(value, int | float):
            return 1
        raise InvalidRequest(
            f"{self._source} holds `{shorten(value)}`, which is a {type(value).__name__}",
            hint="a text that looks like a date stands in quotes",
        )

    def _text(self, text: str) -> int:
        if text.isascii():
            return len(text)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{self._source} holds half a character: a surrogate without its other one",
                hint="write it again in UTF-8",
            ) from None
        return len(text)

    def _container(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...], depth: int) -> int:
        known = self._sizes.get(id(value))
        if known == 0 or depth >= DEPTH:
            raise InvalidRequest(
                f"{self._source} nests its values more than {DEPTH} deep", hint="write it flatter"
            )
        if known is not None:
            return known
        self._sizes[id(value)] = 0
        parts = (
            (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
        )
        total = 1
        if isinstance(value, dict) and any(isinstance(key, list | tuple | dict) for key in value):
            raise InvalidRequest(f"{self._source} has a list for a key", hint="a key is a text")
        for part in parts:
            total += self.size_of(part, depth + 1)
            if total > self._most:
                raise InvalidRequest(
                    f"{self._source} stands for more than {self._most:,} values and characters",
                    hint="write its aliases (`*name`) out, or fewer of them",
                )
        self._sizes[id(value)] = total
        return total


def _first(error: Exception) -> str:
    """The first line of an error's text, or its kind."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0], 200) if lines else type(error).__name__
