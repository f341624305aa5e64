"""How many devices a text names: `8xH100`, `H100:8`, `rtx-4090:4x2`, `4 x A100`, `H100`."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from memfit.core.errors import InvalidRequest, shorten_name

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

MOST = 2**20  # devices: five times those of the largest cluster that is published


class Written(NamedTuple):
    """A device's name with what the text says of how many there are; 0 is not stated."""

    name: str
    number: int = 0  # in all, or of each of `nodes`
    nodes: int = 0


def read_devices(text: str) -> Written:
    """The name and the number of devices in a text; `4x2` behind a colon is 4 machines of 2.

    Raises InvalidRequest where they are none, or more than `MOST` in all.
    """
    text = text.strip()
    if match := _COLON.fullmatch(text):
        name, numbers = match[1], [n for n in (match[2], match[3]) if n is not None]
    elif match := _BEFORE.fullmatch(text):
        name, numbers = match[3], [match[1] or match[2]]
    elif match := _BEHIND.fullmatch(text):
        name, numbers = match[1].strip(), [match[2]]
    else:
        return Written(text)
    # a text of thousands of digits is no number that Python reads
    stated = [int(n) if len(n.lstrip("0")) <= len(str(MOST)) else MOST + 1 for n in numbers]
    if not 0 < prod(stated) <= MOST:
        many = "no device" if 0 in stated else f"more than {MOST:,} devices"
        raise InvalidRequest(
            f"`{shorten_name(text)}` names {many}", hint=f"write a number such as `{name}:8`"
        )
    return Written(name, stated[-1], nodes=stated[0] if len(stated) == 2 else 0)
