"""What the user adds to the catalogue: `devices.toml` and `prices.toml` in a folder of their own.

    ~/.config/memfit/devices.toml     [h100-sxm]            figures that replace the catalogue's
                                      [my-box]              a device of one's own, often with
                                      like = "rtx-4090"     the row that it starts from
    ~/.config/memfit/prices.toml      [h100-sxm]
                                      prices = [{ usd_per_hour = "2.10 USD", seller = "us" }]

`XDG_CONFIG_HOME` moves `~/.config`. Fields and units are those of the catalogue's own files.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.own_folder import own_folder
from memfit.core.system.reading import read_text
from memfit.records import write_atomically

Tables = dict[str, dict[str, Any]]


def own_file(name: str) -> Path:
    """Where the user's file of this name is, or would be."""
    return own_folder() / name


def stamp(name: str) -> tuple[str, int, int]:
    """Path, time of change and size of the user's file; equal stamps mean equal content."""
    path = own_file(name)
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), found.st_mtime_ns, found.st_size


def read_own(name: str) -> Tables:
    """The tables of the user's file; none without one. Raises InvalidRequest naming the file."""
    return _read(*stamp(name))


@lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> Tables:
    del size  # a part of the key
    if not changed:
        return {}
    try:
        tables = tomllib.loads(read_text(Path(path)))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"`{path}` is not TOML: {error}") from None
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidRequest(
                f"`{key}` of `{path}` is not a table", hint="a row begins with `[device-id]`"
            )
    return tables


def put_row(name: str, key: str, row: dict[str, Any]) -> Path:
    """Write one row of the user's file, atomically; all other lines stay as they are.

    A row of the same key is replaced whole. Raises InvalidRequest where nothing can be written.
    """
    path = own_file(name)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [f"{field} = {as_toml(value)}" for field, value in row.items()]
    block = f"[{key}]\n" + "\n".join(lines) + "\n"
    pieces = re.split(r"(?m)^(?=\[)", text)
    whole = "".join(piece for piece in pieces if _key_of(piece) != key)
    gap = "\n" if whole and not whole.endswith("\n\n") else ""
    made = whole + gap + block
    if _others(made, key) != _others(text, key):
        raise InvalidRequest(
            f"[{key}] of `{path}` is written in a way that cannot be replaced",
            hint="take this row out by hand, and try again",
        )
    try:
        write_atomically(path, made.encode())
    except OSError as error:
        raise InvalidRequest(f"cannot write `{path}`: {error.strerror}") from None
    return path


def _others(text: str, key: str) -> Tables | None:
    """Every table but one; None for what is not TOML."""
    try:
        return {name: table for name, table in tomllib.loads(text).items() if name != key}
    except tomllib.TOMLDecodeError:
        return None


def _key_of(piece: str) -> str:
    """The key of a table's text; tables within it (`[key.more]`) are its own."""
    header = re.match(r'\[\s*(?:"([^"]+)"|([^"\].]+))', piece)
    return (header[1] or header[2]).strip() if header else ""


def as_toml(value: object) -> str:
    """A value of a row in one line; strings are written as JSON's, which TOML reads."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_bare(k)} = {as_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(v) for v in value) + "]"
    return _text(value)


def _text(value: object) -> str:
    # JSON leaves DEL as it is, which TOML forbids
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def wrong(path: str | Path, key: str, field: str, error: InvalidRequest) -> InvalidRequest:
    """The error of one field of a user's row, with the file and the key named."""
    return InvalidRequest(f"`{field}` of [{key}] in `{path}`: {error.message}", hint=error.hint)
