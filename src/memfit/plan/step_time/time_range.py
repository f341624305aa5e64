"""The range that a predicted step time carries: what the published steps say of such predictions.

`make docs` writes `catalog/time_errors.json` from the corpus; screens and plans read that alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from memfit.records import Record, from_data

FILE = Path(__file__).parents[2] / "catalog" / "time_errors.json"
LEAST = 20  # steps on which a framework or a device counts as measured


class TimeErrors(Record, frozen=True, kw_only=True):
    """Measured over predicted seconds, of published steps that no constant was fitted on."""

    steps: int
    low: float  # exceeded by 95 % of them
    high: float  # exceeded by 5 %
    lowest: float
    highest: float
    stacks: tuple[str, ...]  # whose constants LEAST steps or more were measured on
    devices: tuple[str, ...]  # with LEAST steps or more


@cache
def read_errors() -> TimeErrors:
    """The errors as `make docs` wrote them."""
    return from_data(msgspec.json.decode(FILE.read_bytes()), TimeErrors, source=str(FILE))


def find_range(seconds: float, stack: str, device: str, few: str = "") -> tuple[float, float, str]:
    """The least and the most seconds that are to be expected, and why the range is that wide.

    few: what the step has that hardly any measured step of this framework had, in words.
    """
    errors = read_errors()
    if stack in errors.stacks and device in errors.devices:
        because = f"9 in 10 of {errors.steps} published steps lie within such a range"
        return seconds * errors.low, seconds * errors.high, because
    what = f"`{device}`" if stack in errors.stacks else "this framework's step"
    what += f" with {few}" if few else ""
    because = (
        f"rates are assumed: fewer than {LEAST} measured steps of {what} are on record, so the"
        f" range is as wide as the worst of {errors.steps} published steps"
    )
    return seconds * errors.lowest, seconds * errors.highest, because
