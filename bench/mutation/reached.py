"""Which blocks of code each test reaches: `pytest -p reached`, with the file that it writes in
MEMFIT_REACHED.

The marks of marking.py stand in a file that the processes share, which a test starts: what they
reach is the test's, if it waits for them. What a cache answers is counted for the test that
filled it.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from marking import COUNT, WANTED, find_places

PLACES: dict[int, tuple[str, int]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if not WANTED:
        return (yield)
    if not PLACES:
        PLACES.update(find_places())
    marks = builtins.__reached__  # type: ignore[attr-defined]
    marks[:] = bytes(COUNT)
    try:
        return (yield)
    finally:
        reached: dict[str, list[int]] = {}
        at = marks.find(b"\1")
        while at >= 0:
            file, line = PLACES[at]
            reached.setdefault(file, []).append(line)
            at = marks.find(b"\1", at + 1)
        with Path(WANTED).open("a", encoding="utf-8") as kept:
            kept.write(json.dumps({"test": item.nodeid, "reached": reached}) + "\n")
