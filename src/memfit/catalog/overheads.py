"""The bands of `overheads.toml`: what a process holds on a device outside the caching allocator."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from memfit import units
from memfit.hardware import Device


def find_band(table: str, device: Device) -> dict[str, int] | None:
    """low, typical and high in bytes, of the device's own row or its vendor's; None without one."""
    path = Path(__file__).with_name("overheads.toml")
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8")).get(table, [])
    for key in (device.id, device.vendor):
        for row in rows:
            if row["match"] == key:
                return {name: units.parse_bytes(row[name]) for name in ("low", "typical", "high")}
    return None
