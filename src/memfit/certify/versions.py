"""Versions of torch that certificates were tried with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from memfit.records.shapes import BatchShape as BatchShape

if TYPE_CHECKING:
    pass


OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.13"  # tried; the self-check judges a newer one


def release(text: str) -> tuple[int, ...]:
    """(major, minor) of a version such as `2.13.0+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
