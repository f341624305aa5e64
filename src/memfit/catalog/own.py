"""What the user adds to the catalogue: `devices.toml` and `prices.toml` in a folder of their own.

    ~/.config/memfit/devices.toml     [h100-sxm]            figures that replace the catalogue's
                                      [my-box]              a device of one's own, often with
                                      like = "rtx-4090"     the row that it starts from
    ~/.config/memfit/prices.toml      [h100-sxm]
                                      prices = [{ usd_per_hour = "2.10 USD", seller = "us" }]

`XDG_CONFIG_HOME` moves `~/.config`. Fields and units are those of the catalogue's own files.
"""

from __future__ import annotations

import os
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from memfit.errors import InvalidRequest

Tables = dict[str, dict[str, Any]]


def own_file(name: str) -> Path:
    """Where the user's file of this name is, or would be."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path("~/.config").expanduser()
    return base / "memfit" / name


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
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequest(f"`{path}` is not a text file") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read `{path}`: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"`{path}` is not TOML: {error}") from None
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidRequest(
                f"`{key}` of `{path}` is not a table", hint="a row begins with `[device-id]`"
            )
    return tables


def wrong(path: str | Path, key: str, field: str, error: InvalidRequest) -> InvalidRequest:
    """The error of one field of a user's row, with the file and the key named."""
    return InvalidRequest(f"`{field}` of [{key}] in `{path}`: {error.message}", hint=error.hint)
