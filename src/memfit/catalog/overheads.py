"""The bands of `overheads.toml`: what a process holds on a device outside the caching allocator."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from memfit.core import units
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.recipe import Parallel


class Overhead(Record, frozen=True, kw_only=True):
    """What a process holds on a device outside the caching allocator, bytes; a band."""

    low: int
    typical: int
    high: int
    source: str
    verified: bool
    like: str = ""  # the device whose measured figure is assumed to hold

    def __getitem__(self, place: int) -> int:
        """The low end, the typical value or the high end of the band: 0, 1 or 2."""
        return (self.low, self.typical, self.high)[place]

    @property
    def because(self) -> str:
        """The band in words; where its figures come from stands in overheads.toml."""
        if self.low == self.high:
            return f"{units.show_gib(self.typical)}: {self.source}"
        known = "typical of measured" if self.verified else "typical of published"
        if self.like:
            known = f"assumed to be as on `{self.like}`, within published"
        return (
            f"{known} figures between {units.show_gib(self.low)} and"
            f" {units.show_gib(self.high)} (catalog/overheads.toml)"
        )


def find_overhead(device: Device) -> Overhead | None:
    """The row of `catalog/overheads.toml` for this device, or what the user measured of it."""
    made = device.calibration
    if made is not None and made.context is not None:
        return Overhead(
            low=made.context, typical=made.context, high=made.context, source=device.basis,
            verified=True,
        )  # fmt: skip
    return _find_row("overhead", device)


def find_working(device: Device) -> Overhead | None:
    """What a run on a CPU holds beside its imports and its tensors; None elsewhere."""
    return _find_row("working", device)


def find_preparing(device: Device) -> Overhead | None:
    """What planning and certifying hold on a CPU beside their imports; None elsewhere."""
    return _find_row("preparing", device)


def find_outside(device: Device, parallel: Parallel, groups: int | None = None) -> Overhead | None:
    """The context and NCCL's communicators together; None where the context is unknown.

    One communicator for each of `groups`; left out, for each axis with more than one rank.
    """
    context, each = find_overhead(device), _find_row("communicator", device)
    count = count_axes(parallel) if groups is None else groups
    if context is None or not count:
        return context
    if each is None:
        return None
    return Overhead(
        low=context.low + count * each.low,
        typical=context.typical + count * each.typical,
        high=context.high + count * each.high,
        source=f"{context.source}; NCCL, {count} x: {each.source}",
        verified=context.verified and each.verified,
        like=context.like,
    )


def count_axes(parallel: Parallel) -> int:
    """Axes of the mesh with more than one rank."""
    p = parallel
    return sum(ranks > 1 for ranks in (p.dp_replicate, p.dp_shard, p.tp, p.cp, p.pp, p.ep))


@cache
def _find_row(table: str, device: Device) -> Overhead | None:
    path = Path(__file__).with_name("overheads.toml")
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))[table]
    # a device's own row goes before its architecture's, and that before its vendor's
    for key in (device.id, device.architecture, device.vendor):
        for row in rows:
            if row["match"] == key:
                low, typical, high = (units.parse_bytes(row[k]) for k in ("low", "typical", "high"))
                return Overhead(
                    low=low, typical=typical, high=high, source=row["source"],
                    verified=row["verified"], like=row.get("like", ""),
                )  # fmt: skip
    return None
