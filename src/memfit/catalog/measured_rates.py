"""What memfit measured of a card's speed itself: `make gpu`'s curves, for memfit's own step.

Constants of other frameworks were fitted beside the best product anyone published
(`catalog/rates.toml`), so that these curves are for steps that memfit runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from memfit.records import Record, from_data
from memfit.records.hardware import Curve

FILE = Path(__file__).with_name("measured_rates.json")  # `make docs` writes it from `make gpu`'s


class MeasuredRates(Record, frozen=True, kw_only=True):
    """Curves of one card, and seconds from one small kernel to the next; None: not measured."""

    source: str
    curves: tuple[Curve, ...]
    launch_seconds: float | None = None


@cache
def read_measured() -> Mapping[str, MeasuredRates]:
    """By the device's id."""
    rows = msgspec.json.decode(FILE.read_bytes())
    return {key: from_data(row, MeasuredRates, source=str(FILE)) for key, row in rows.items()}
