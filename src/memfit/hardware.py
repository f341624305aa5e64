"""Accelerators and what connects them; every number comes from a row of `catalog/`."""

from __future__ import annotations

from typing import Literal

import msgspec

from memfit.nouns import Noun


class Price(Noun, frozen=True, kw_only=True):
    """US dollars per device-hour, as one seller stated it."""

    usd_per_hour: float
    kind: str
    source: str


class Link(Noun, frozen=True, kw_only=True):
    """One interconnect: bytes per second that one device sends, in one direction."""

    name: str
    unidirectional: float | None


class Device(Noun, frozen=True, kw_only=True):
    """One accelerator. `None` means nobody has stated it; it is shown as unknown, never guessed."""

    id: str
    name: str
    vendor: str
    architecture: str
    compute_capability: str | None
    match: tuple[str, ...]  # device names as the driver prints them, and common aliases
    memory: int | None  # bytes usable by torch (what the driver reports less its own share)
    memory_driver: int | None  # bytes the driver reports
    memory_datasheet: str  # as printed on the box
    bandwidth: float | None  # bytes per second
    flops: dict[str, float]  # dense FLOP/s by dtype: fp32 tf32 bf16 fp16 fp8 int8 fp4
    link: Link
    devices_per_node: str
    watts: float | None
    prices: tuple[Price, ...]
    unverified: tuple[str, ...]  # fields whose source is weak; shown with a mark
    notes: str
    sources: tuple[str, ...]
    checked: str  # date of the row, YYYY-MM-DD
    # the best matrix product anyone measured, FLOP/s by dtype
    flops_measured: dict[str, float] = msgspec.field(default_factory=dict)
    internode: str = ""  # the usual network between nodes, in words
    pcie_generation: int | None = None
    multiprocessors: int | None = None  # of an NVIDIA GPU: how many blocks run at once

    def __hash__(self) -> int:
        return hash(self.id)  # rates are dicts, which have no hash

    @property
    def is_cpu(self) -> bool:
        """Whether tensors live in the host's memory: no context, no caching allocator."""
        return self.vendor == "CPU"

    @property
    def platform(self) -> Literal["cpu", "cuda", "rocm"]:
        """Whose kernels run there."""
        return "cpu" if self.is_cpu else "rocm" if self.vendor == "AMD" else "cuda"

    @property
    def capability(self) -> tuple[int, int] | None:
        """(major, minor) of the compute capability; None when unknown or not NVIDIA's."""
        if self.vendor != "NVIDIA" or self.compute_capability is None:
            return None
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor or 0)
