"""What `make test` runs: which files, and which cases of a matrix, as few as have every value of
every axis between them.

Tests of what a user types and reads are those of `make test-journeys` (the marker `journey`).

`@pytest.mark.covering` says of a parametrised test that its cases differ in settings alone, so
that a rule fails whichever case with the setting is run. `covering(CASES)` says what the names
stand for, whose fields and keys are the axes then. `make test-wide` runs all cases.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

# under tests/: folders, and files of others
JOURNEYS = {
    "accuracy", "bench", "cli", "docs", "export", "journeys", "screens", "ui",
    "core/test_libraries.py", "core/test_plugins.py",
}  # fmt: skip
TESTS = Path(__file__).parent


def is_journey(path: Path) -> bool:
    """Whether a test, or all of a folder, is about what a user types and reads."""
    if not path.is_relative_to(TESTS):
        return False
    place = path.relative_to(TESTS).as_posix()
    return place in JOURNEYS or place.partition("/")[0] in JOURNEYS


Axes = frozenset[tuple[str, str]]  # each with its value


def find_axes(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Fields of records, keys of mappings and the words of a name: "llama, lora, packed".

    Of counts: none, one, and of others how large they are and whether two divide them.
    """
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from find_axes(part, f"{name}.{key}")
    elif isinstance(value, str):
        for word in re.split(r"[,:] ", value):
            yield name, word
    elif isinstance(value, Sequence):
        for place, part in enumerate(value):
            yield from find_axes(part, f"{name}.{place}")
    elif isinstance(value, int) and abs(value) > 1:
        yield name, f"{len(str(value))} digits, {'odd' if value % 2 else 'even'}"
    else:
        yield name, getattr(value, "__name__", str(value))


def choose(cases: Mapping[str, Axes]) -> set[str]:
    """Each time the case with most values that no chosen case has; of several always the same."""
    left = set().union(*cases.values())
    chosen = set()
    while left:
        best = max(cases, key=lambda name: (len(cases[name] & left), crc32(name.encode())))
        chosen.add(best)
        left -= cases[best]
    return chosen


def beyond_the_cover(items: Sequence[Any]) -> Iterator[Any]:
    """Cases of marked tests that the share of `make test` does without."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("wide"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        chosen = choose({item.callspec.id: axes_of(item) for item in found})
        yield from (item for item in found if item.callspec.id not in chosen)


def axes_of(item: Any) -> Axes:
    """What the marker says that the case's parameters stand for, or they themselves."""
    named = next(iter(item.get_closest_marker("covering").args), {})
    found: set[tuple[str, str]] = set()
    for name, value in item.callspec.params.items():
        is_name = isinstance(value, Hashable) and value in named
        found |= {*find_axes(named[value] if is_name else value, name)}
    return frozenset(found)
