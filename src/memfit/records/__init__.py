"""The records that verbs exchange: frozen, keyword-only, read strictly from JSON.


`msgspec.Struct` gives frozen slots, strict conversion with the path of the offending key, JSON and
JSON Schema, at a fifth of pydantic's import time (the planner starts in about 0.1 s).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.core.system.reading import check_data, read_bytes, shorten

N = TypeVar("N", bound="Record")
WITH_UNIT = "with its unit"  # of the descriptions of quantities, which are texts
LIKELY = 1000  # a larger number is rarely of the example's unit
MOST_RECORD = 2**30  # bytes of a record: a run.json has two numbers a step


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record; equality and `repr` come with it."""

    @classmethod
    def prepare(cls, data: Any) -> Any:
        """The data as it is converted; a record that reads looser texts than its types does so."""
        return data

    @classmethod
    def describe_unknown(cls, key: str, value: object) -> str:
        """A hint about a key that the record does not have; "" for none but the nearest key."""
        del key, value
        return ""

    @classmethod
    def describe_value(cls, key: str, value: object) -> str:
        """A hint about a value that the key cannot have; "" for none but what it can have."""
        del key, value
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, as `--json` prints them."""
        data: dict[str, Any] = to_data(self)
        return data


def to_data(record: object) -> Any:
    """Plain dicts, lists, strings and numbers, ready for JSON."""
    return msgspec.to_builtins(record, str_keys=True)


def to_json(record: object, *, indent: int = 2) -> str:
    """JSON with keys in declared order."""
    return msgspec.json.format(msgspec.json.encode(record), indent=indent).decode()


def from_data(data: object, kind: type[N], *, source: str) -> N:
    """Read plain data strictly; unknown keys and wrong types name `where` and the key's path."""
    data = kind.prepare(data)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _explain(error, data, kind, source) from None


def read_json(path: Path, kind: type[N]) -> N:
    """Read a record from a JSON file written by `write_json`."""
    edited = "it was cut short or edited: write it again"
    content = read_bytes(path, most=MOST_RECORD)
    try:
        data = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"`{shorten(path, 300)}` is not JSON: {error}", hint=edited) from None
    check_data(data, source=f"`{shorten(path, 300)}`")
    return from_data(data, kind, source=str(path))


def write_json(path: Path, record: object) -> None:
    """Write atomically: a reader sees the old file or the new one, never half of one."""
    write_atomically(path, (to_json(record) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, rename over it; on failure nothing is left behind.

    Raises OSError, with the target's name, where the folder cannot be made or takes no file.
    """
    import tempfile  # 4 ms that a plan on the screen does not need

    prefix = f".{path.name}.{os.getpid()}-"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix)
    except (FileExistsError, FileNotFoundError):  # a link to a folder that is gone, or `/proc/x`
        gone = "No folder can be made there"
        raise NotADirectoryError(errno.ENOTDIR, gone, str(path.parent)) from None
    except OSError as error:  # a temporary file's name would tell nobody anything
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_TEMPORARY = re.compile(r"\..+\.([0-9]+)-[a-z0-9_]{8}")


def remove_temporary(folder: Path) -> None:
    """Delete what `write_atomically` had begun in a folder when its process was killed."""
    for path in folder.glob(".*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _is_alive(int(match[1])):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?")


def _explain(
    error: msgspec.ValidationError, data: object, kind: type[Record], source: str
) -> InvalidRequest:
    """Turn msgspec's message into ours: the key's path, both values, the nearest known key."""
    text = str(error)
    if match := _UNKNOWN.fullmatch(text):
        key, path = match[1], (match[2] or "").lstrip(".")
        known = _fields_at(kind, path)
        near = did_you_mean(key, known)
        hint = f"did you mean {near}?" if near else f"known keys: {', '.join(known)}"
        full = f"{path}.{key}" if path else key
        hint = kind.describe_unknown(key, _value_at(data, full)) or hint
        return InvalidRequest(f"unknown key `{full}` in {source}", hint=hint)
    problem, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    found = _value_at(data, path)
    value = shorten(found)
    shown = f"`{path}: {value}`" if path else f"`{value}`"
    problem, hint = (
        problem[:1].lower() + problem[1:],
        kind.describe_value(path, found) or _hint(kind, path, value),
    )
    if isinstance(found, int | float) and not isinstance(found, bool) and WITH_UNIT in hint:
        problem = "a number without its unit"
        if 0 < found < LIKELY:  # the user's own number in the example
            hint = re.sub(r"`\d+ ", f"`{value} ", hint)
    return InvalidRequest(f"{shown} in {source}: {problem}", hint=hint)


def _steps(path: str) -> list[str]:
    return [s for s in re.split(r"[.\[\]]+", path) if s]


def _value_at(data: object, path: str) -> object:
    for step in _steps(path):
        if isinstance(data, Mapping):
            data = data.get(step)
        elif isinstance(data, list) and step.isdigit():
            data = data[int(step)]
    return data


def _kind_at(kind: type[Record], path: str) -> Any:
    """The declared type of the field at a path; unions are searched for the record they hold."""
    found: Any = kind
    for step in _steps(path):
        record = _record_in(found)
        if record is None:
            return None
        types = {f.encode_name: f.type for f in msgspec.structs.fields(record)}
        found = types.get(step)
    return found


def _record_in(kind: Any) -> type[Record] | None:
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind
    for part in getattr(kind, "__args__", ()):
        if (record := _record_in(part)) is not None:
            return record
    return None


def _fields_at(kind: type[Record], path: str) -> list[str]:
    record = _record_in(_kind_at(kind, path))
    return [f.encode_name for f in msgspec.structs.fields(record)] if record else []


def _hint(kind: type[Record], path: str, value: object) -> str:
    """The field's own description (msgspec.Meta), which says what may be written there; of words,
    all of them, and which the value is like."""
    found = _kind_at(kind, path)
    parts = [found, *getattr(found, "__args__", ())]
    for part in parts:
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    words = [w for p in parts for w in getattr(p, "__args__", ()) if isinstance(w, str)]
    near = did_you_mean(value, words) if isinstance(value, str) else ""
    meant = f"; did you mean {near}?" if near else ""
    return f"one of: {', '.join(words)}{meant}" if words else ""
