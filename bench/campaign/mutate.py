"""Damage, drawn from a seed: of bytes, of lines, of values in a document, of a name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]
# what breaks readers: ends of ranges, other kinds, half characters, terminals' codes
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**39, 10**400, 0.0, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "0", "-1", "1e9", "auto", "null", "\x00",
    "\x1b[2J\x1b]0;x\x07", "a\nb", "a\u2028b\x85c\x1cd", "\ud800", "../../../etc/passwd", "~nobody",
    "/dev/zero", "x" * 5000, "9" * 5000, "１２", "é" * 300, [], [[]], [None], {}, {"": {}},
    {"a": 1}, [1, 2, 3], ["q_proj"], [-1] * 100, {"name": "adamw"}, "72 GiB", "1 B", "8xH100",
    "999999x999999", "h100-sxm:8", "2001-01-01", "%s%n{0}", "a: b", "`id`", "<script>", "𝔘",
)  # fmt: skip
TEXTS: tuple[bytes, ...] = (
    b"\x00", b"\xff\xfe", b"\x1b[31m", b"\xed\xa0\x80", b"[" * 3000, b"{" * 200, b"- " * 400,
    b"9" * 5000, b"&a [*a]", b"!!int foo", b"!!python/object:os.system x", b"2001-13-45", b".inf",
    b"? ", b": ", b"\t", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"\x1c", b"'", b'"', b"#", b"---\n",
    b"%YAML 9.9\n", b"<<: 1\n", b"\\ud800", b"1e999999", b"0x", b"e" * 300, b"]", b"}", b",",
)  # fmt: skip


def mutate(chance: random.Random, content: bytes) -> bytes:
    """One to three mutations of the content."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = chance.choice(MUTATIONS)(chance, content)
    return content


def flip(chance: random.Random, content: bytes) -> bytes:
    """Change a bit."""
    if not content:
        return content
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def cut(chance: random.Random, content: bytes) -> bytes:
    """Keep a beginning."""
    return content[: chance.randrange(len(content) + 1)]


def drop(chance: random.Random, content: bytes) -> bytes:
    """Leave some bytes out."""
    at, length = chance.randrange(len(content) + 1), chance.choice((1, 2, 8, 64))
    return content[:at] + content[at + length :]


def insert(chance: random.Random, content: bytes) -> bytes:
    """Put in what breaks readers."""
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice(TEXTS) + content[at:]


def move_line(chance: random.Random, content: bytes) -> bytes:
    """Repeat, remove or move a line."""
    lines = content.split(b"\n")
    line = lines.pop(chance.randrange(len(lines)))
    for _ in range(chance.choice((0, 1, 2))):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


def change_value(chance: random.Random, content: bytes) -> bytes:
    """Another value, or a key more or less, somewhere in a document; JSON stays JSON, and YAML
    becomes JSON, which is YAML."""
    try:
        data = _load(content)
        places = list(_places(data))
    except Exception:  # what is nested too deep included
        return flip(chance, content)
    if not places:
        return insert(chance, content)
    holder, key = chance.choice(places)
    draw = chance.random()
    if draw < 0.6:
        holder[key] = deepcopy(chance.choice(VALUES))
    elif draw < 0.75 and isinstance(holder, dict):
        del holder[key]
    elif draw < 0.85 and isinstance(holder, dict):
        holder[f"{key}_"] = holder[key]
    else:
        other, name = chance.choice(places)
        holder[key] = None if _holds(other[name], holder) else deepcopy(other[name])
    try:
        return _dump(data)
    except (TypeError, ValueError):
        return insert(chance, content)


def _load(content: bytes) -> Any:
    text = content.decode()
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(line.startswith("{") for line in lines):  # JSON lines
        return _Lines(json.loads(line) for line in lines)
    try:
        return json.loads(text)
    except ValueError:
        from ruamel.yaml import YAML

        return YAML(typ="safe", pure=True).load(text)


class _Lines(list[Any]):
    """The documents of a file with one a line."""


def _dump(data: Any) -> bytes:
    if isinstance(data, _Lines):
        return b"\n".join(_dump(line) for line in data) + b"\n"
    return json.dumps(data, default=str).encode("utf-8", "surrogatepass")


def _places(data: Any) -> Any:
    if isinstance(data, dict):
        for key in list(data):
            yield data, key
            yield from _places(data[key])
    elif isinstance(data, list):
        for at in range(len(data)):
            yield data, at
            yield from _places(data[at])


def _holds(value: Any, holder: Any) -> bool:
    if value is holder:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds(part, holder) for part in parts)


MUTATIONS: tuple[Mutation, ...] = (
    flip, cut, drop, insert, move_line, change_value, change_value, change_value, change_value,
)  # fmt: skip


def minimise(content: bytes, fails: Callable[[bytes], bool], tries: int = 200) -> bytes:
    """A shorter content that still fails, by leaving out halves, quarters, … (Zeller, ddmin)."""
    size = max(1, len(content) // 2)
    while size and tries > 0:
        at = 0
        while at < len(content) and tries > 0:
            shorter = content[:at] + content[at + size :]
            tries -= 1
            if shorter != content and fails(shorter):
                content = shorter
            else:
                at += size
        size //= 2
    return content
