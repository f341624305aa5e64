"""Machines by the names of those who rent them out: `p4d.24xlarge`, `a3-highgpu-8g`."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

# SageMaker and Azure put a word before the name: `ml.p5.48xlarge`, `Standard_ND96isr_H100_v5`
_BEFORE = re.compile(r"ml\.|standard[_ ]")
# how sellers name them: the table is not opened for `h100-sxm` or `rtx 4090`
_ALIKE = re.compile(
    r"\S+\.(?:\d*xlarge|metal)|a\d+x?-[a-z]+gpu-\d+g|g2-standard-\d+|n[cd]\d+\S*_v\d+"
)


class Machine(NamedTuple):
    """What one machine has: the id of its device, and how many of it."""

    device: str
    devices: int
    seller: str


def find_machine(name: str) -> Machine | None:
    """The machine of that name, in any case of letters; None where no seller lists it."""
    word = _BEFORE.sub("", name.strip().lower(), count=1).replace(" ", "_")
    return _machines().get(word) if _ALIKE.fullmatch(word) else None


@cache
def _machines() -> dict[str, Machine]:
    tables = tomllib.loads(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8"))
    found: dict[str, Machine] = {}
    for seller, rows in tables.items():
        for name, text in rows.items():
            device, _, count = text.partition(":")
            found[name] = Machine(device, int(count), seller)
    return found
