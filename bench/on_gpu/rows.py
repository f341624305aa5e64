"""Rows: what one unit of a slice gave, one JSON line each, on disk as soon as it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from on_gpu.paths import ROOT

LANDED = ROOT / "bench" / "results" / "gpu" / "rows.jsonl"
Row = dict[str, Any]
Key = tuple[str, str, str]  # slice, unit, device


class Place(NamedTuple):
    """Where is measured, and where results go."""

    device: str  # cuda or cpu, as torch calls it
    row: str  # the device's row of the catalogue
    out: Path

    @property
    def rehearsal(self) -> bool:
        """Whether tiny twins run on a CPU, to see that the command works."""
        return self.device == "cpu"


class Unit(NamedTuple):
    """One thing to measure: it ends in one row."""

    name: str
    seconds: float = 180.0  # after which it is stopped, and its row says so
    needs: tuple[str, ...] = ()  # libraries without which it is skipped by name
    allocator: str = ""  # settings that its process starts with, as some libraries start CUDA early


def key_of(row: Row) -> Key:
    return row["slice"], row["name"], row["device"]


def read_rows(path: Path) -> dict[Key, Row]:
    """The rows of a file; a line that was cut while it was written is left out."""
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[key_of(row)] = row
    return found


class Rows:
    """The rows of an out folder, beside those that have been landed before."""

    def __init__(self, path: Path, landed: Path | None = LANDED) -> None:
        self.path = path
        self._known = (read_rows(landed) if landed else {}) | read_rows(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            whole = "".join(_line(row) for row in read_rows(path).values())
            path.write_text(whole, encoding="utf-8")

    def has(self, key: Key, *, again: bool = False) -> bool:
        """Whether nothing is left to do: what was skipped is tried anew, what failed if told."""
        row = self._known.get(key)
        if row is None or "skipped" in row:
            return False
        return not (again and (row.get("failed") or row.get("broken")))  # of a unit, of its tests

    def add(self, row: Row) -> None:
        """The row is on disk when this returns."""
        self._known[key_of(row)] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Row]:
        return iter(self._known.values())


def _line(row: Row) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n"
