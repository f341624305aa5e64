"""How many devices a text names: `8xH100`, `H100:8`, `rtx-4090:4x2`, `4 x A100`, `H100`."""

from __future__ import annotations

import re
from typing import NamedTuple

from memfit.core.errors import InvalidRequest

_TIMES = "[x×*]"
# 8xH100, 8 H100, 2 4090; a number of four digits is a card's own, as in `4060 Ti` and `4090x2`;
# `24 GB` is a size
_BEFORE = re.compile(
    rf"(?:(\d+)\s*{_TIMES}|(\d{{1,3}})(?=\s+(?!gi?b?\b)(?:[a-z]|\d{{4}})))"
    r"\s*((?=.*[a-z]|\d{4})\S.*)",
    re.IGNORECASE,
)
_COLON = re.compile(rf"(\S.*?)\s*:\s*(\d+)(?:\s*{_TIMES}\s*(\d+))?")  # H100:8, rtx-4090:4x2
# H100x8 and H100 x8; the x of `rtx 4090` and of `cpu-x86` is a part of the name
_BEHIND = re.compile(rf"(\S.*?)(?<=[\dA-Za-z\s])(?<![A-Za-z])\s*{_TIMES}\s*(\d+)")


class Written(NamedTuple):
    """A device's name with what the text says of how many there are; 0 is not stated."""

    name: str
    number: int = 0  # in all, or of each of `nodes`
    nodes: int = 0


def read_devices(text: str) -> Written:
    """The name and the number of devices in a text; `4x2` behind a colon is 4 machines of 2.

    Raises InvalidRequest where the number is 0.
    """
    text = text.strip()
    found = Written(text)
    if match := _COLON.fullmatch(text):
        first, second = int(match[2]), match[3]
        found = (
            Written(match[1], first)
            if second is None
            else Written(match[1], int(second), nodes=first)
        )
        stated = [first] if second is None else [first, int(second)]
    elif match := _BEFORE.fullmatch(text):
        number = int(match[1] or match[2])
        found, stated = Written(match[3], number), [number]
    elif match := _BEHIND.fullmatch(text):
        found, stated = Written(match[1].strip(), int(match[2])), [int(match[2])]
    else:
        return found
    if 0 in stated:
        raise InvalidRequest(
            f"`{text}` names no device", hint=f"write 1 or more, such as `{found.name}:8`"
        )
    return found
