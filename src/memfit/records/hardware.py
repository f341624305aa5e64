"""Accelerators and what connects them; every number comes from a row of `catalog/`."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from memfit.core.units import GIB
from memfit.records import Record

# The least share of its data sheet that a device on record gives to torch is 0.907 (RTX 5060).
LEAST_SHARE = 0.9
_SHEET = re.compile(r"([\d./]+) GB")  # "80 GB", "8/16/24 GB"
PriceKind = Literal["on-demand", "spot", "reserved", "capacity block"]


class Price(Record, frozen=True, kw_only=True):
    """US dollars per device-hour, as one seller stated it."""

    usd_per_hour: float
    kind: PriceKind = "on-demand"
    seller: str = ""
    region: str = ""  # "" where the seller asks the same everywhere, or did not say
    source: str = ""
    date: str = ""  # of the source, or the day it was read: YYYY, YYYY-MM or YYYY-MM-DD
    note: str = ""
    weak: bool = False  # contradicted by better sources: shown, and chosen only where alone
    own: bool = False  # of the user's own file


class Link(Record, frozen=True, kw_only=True):
    """One interconnect: bytes per second that one device sends, in one direction."""

    name: str
    unidirectional: float | None


class BusBandwidth(Record, frozen=True, kw_only=True):
    """What nccl-tests measured of one collective, by how many whole machines took part."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter"]
    device: str  # a catalogue id
    size: int  # bytes of the whole message
    machines: tuple[int, ...]  # rising
    bus: tuple[float, ...]  # bytes per second
    source: str


class Fabric(Record, frozen=True, kw_only=True):
    """What joins devices of a machine, or machines; every number comes from a row of `catalog/`."""

    id: str
    name: str
    match: tuple[str, ...] = ()  # names of devices' links, and common aliases
    joins: Literal["devices", "machines"]
    hop: Literal["nvlink", "pci", "net"]  # whose latencies hold
    adapters: int = 1  # of one machine
    bandwidth: float | None = None  # bytes per second of one adapter, one direction
    efficiency: float | None = None  # share of it that large messages reach; None: nobody said
    in_switch: float | None = None  # share of that of an all_reduce that the switch adds up
    reach: int | None = None  # devices joined, where they are fewer than a machine's
    machine: int | None = None  # devices of what is one machine here
    measured: tuple[BusBandwidth, ...] = ()
    notes: str = ""
    sources: tuple[str, ...]
    checked: str  # date of the row, YYYY-MM-DD


class Curve(Record, frozen=True, kw_only=True):
    """Measured rates of one kind of work, by the size of one call; sizes rise.

    points: (FLOP, FLOP/s) of `matmul` and `attention`; (bytes, bytes/s) of the others: `memory` as
    read and written, `to_device` and `to_host` over PCIe, `all_reduce` as bus bandwidth.
    """

    work: Literal["matmul", "attention", "memory", "to_device", "to_host", "all_reduce"]
    dtype: str = ""  # fp32 bf16 fp16 …; "" where bytes are counted
    kernel: str = ""  # of attention: math flash efficient cudnn
    points: tuple[tuple[float, float], ...]
    spread: float = 0.0  # the widest (slowest / median - 1) of a point's repeats
    source: str = ""

    @property
    def best(self) -> float:
        """The highest rate of all sizes."""
        return max(rate for _, rate in self.points)


class Calibration(Record, frozen=True, kw_only=True):
    """When and with what the user measured a device (`memfit calibrate`), and what has no size."""

    date: str  # YYYY-MM-DD
    versions: dict[str, str]
    devices: int = 1  # that took part in all_reduce
    launch_seconds: float | None = None  # of one small kernel after another
    context: int | None = None  # bytes outside the caching allocator, as the driver counts them


class Device(Record, frozen=True, kw_only=True):
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
    network: str = ""  # the same as an id of `links.toml`; "" where the words say too little
    pcie_generation: int | None = None
    multiprocessors: int | None = None  # of an NVIDIA GPU: how many blocks run at once
    curves: tuple[Curve, ...] = ()
    calibration: Calibration | None = None  # None: nothing of this row is the user's measurement
    own: str = ""  # the user's file that this row, or a part of it, comes from

    def __hash__(self) -> int:
        return hash(self.id)  # rates are dicts, which have no hash

    def curve(self, work: str, dtype: str = "", kernel: str = "") -> Curve | None:
        """The measured curve of this work; None when nobody measured it."""
        for curve in self.curves:
            if (curve.work, curve.dtype, curve.kernel) == (work, dtype, kernel):
                return curve
        return None

    @property
    def context(self) -> int | None:
        """Bytes beside the allocator's memory, as measured by the user; None: nobody has."""
        return None if self.calibration is None else self.calibration.context

    def with_context(self, nbytes: int) -> Device:
        """The same with bytes that were measured beside tensors: a context, or libraries."""
        made = self.calibration or Calibration(date="", versions={})
        calibration = msgspec.structs.replace(made, context=nbytes)
        return msgspec.structs.replace(self, calibration=calibration)

    @property
    def basis(self) -> str:
        """Whose figures the speeds of this row are, in words."""
        if self.calibration is not None:
            own = f"your own measurement of {self.calibration.date}"
            sheet = self.flops != self.flops_measured and self.curve("memory") is None
            return f"{own}, its bandwidth by the vendor's sheet" if sheet else own
        if self.own:
            return "your own row"
        if self.curves or self.flops_measured:
            return "published measurements"
        return "the vendor's sheet"

    @property
    def most_memory(self) -> int | None:
        """Bytes that no run can exceed: `memory`, or the largest figure of the data sheet.

        A data sheet's GB are 2^30 bytes at most.
        """
        if self.memory is not None:
            return self.memory
        found = _SHEET.fullmatch(self.memory_datasheet)
        return round(max(map(float, found[1].split("/")))) * GIB if found else None

    @property
    def planned_memory(self) -> int | None:
        """Bytes to plan with: `memory`, or the share of the data sheet that every device gives."""
        if self.memory is not None or self.most_memory is None:
            return self.memory
        return round(self.most_memory * LEAST_SHARE)

    def describe_assumed(self, usable: int | None) -> str:
        """Return a note on a limit that is `planned_memory` by assumption; "" of others."""
        if self.memory is not None or usable is None or usable != self.planned_memory:
            return ""
        return (
            f"{LEAST_SHARE:.0%} of the data sheet of `{self.id}` ({self.memory_datasheet}, assumed:"
            " what it gives to torch is not on record; `limits.memory` may say up to the whole)"
        )

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
