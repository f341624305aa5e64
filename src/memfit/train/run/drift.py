"""Live counters held against the certificate, phase by phase, while a run goes on.

A phase above its own certified peak is named at once, though the run's peak may be elsewhere and
the limit far: what grows there will not stop growing at the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from memfit.core import units
from memfit.core.units import KIB
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.results import Certificate, Excess

# What a counter may be above the certificate: its error on a GPU has a median of half of this.
RELATIVE = 0.01
ABSOLUTE = 64 * KIB  # the norms and scalars of a step, on which no ledger is exact


class Counters(NamedTuple):
    """What a run has reached so far, bytes; on a CPU the allocator's are 0."""

    peaks: Mapping[Phase, int]
    ledger: Ledger  # who held each of them, where that was watched
    reserved: int = 0
    device_total: int = 0


class Drift(NamedTuple):
    """One figure above its certified one by more than the band."""

    name: str  # a phase, or a figure of the allocator
    certified: int
    measured: int
    component: str  # who holds the most more than certified; "" when nobody was watched

    @property
    def excess(self) -> int:
        """Bytes above the certified figure."""
        return self.measured - self.certified


def is_beyond(measured: int, certified: int) -> bool:
    """Whether the difference is more than the band explains."""
    return measured - certified > max(RELATIVE * certified, ABSOLUTE)


def find_drift(certificate: Certificate, counters: Counters, place: int = 0) -> Iterator[Drift]:
    """Every phase and figure that is beyond the band, the phases first.

    place: of a pipeline, the stage whose counters they are.
    """
    promised = certificate.phases_at(place)
    for phase, measured in counters.peaks.items():
        certified = promised.get(str(phase))
        if certified is not None and is_beyond(measured, certified):
            held = counters.ledger.at(phase)
            component = name_component(held, certificate.ledger.at(phase))
            if promised != certificate.phases:
                component = "the certificate names the tensors of another stage"
            yield Drift(str(phase), certified, measured, component)
    memory = certificate.memory
    for name, reached, limit, why in (
        ("reserved", counters.reserved, memory.peak_reserved, "cached segments: fragmentation"),
        ("device_total", counters.device_total, memory.device_total,
         "the context, or another process on the device"),
    ):  # fmt: skip
        if limit is not None and is_beyond(reached, limit):
            yield Drift(name, limit, reached, why)


def name_component(held: Iterable[Entry], certified: Iterable[Entry]) -> str:
    """Kind and owner of the largest excess, with its largest tensor; "" when there is none."""
    rows = compare_entries(held, certified)
    if not rows or rows[0].excess <= 0:
        return ""
    worst = rows[0]
    line = f"{worst.kind} of {worst.owner} hold {units.show_bytes(worst.excess)} more"
    return f"{line} ({worst.because})" if worst.because else line


def compare_entries(held: Iterable[Entry], certified: Iterable[Entry]) -> tuple[Excess, ...]:
    """Both ledgers of one phase by kind and owner, the largest excess first."""
    sums: dict[tuple[Kind, str], list[int]] = {}
    reasons: dict[tuple[Kind, str], str] = {}
    for place, entries in enumerate((held, certified)):
        for entry in entries:
            key = (entry.kind, entry.owner)
            sums.setdefault(key, [0, 0])[place] += entry.nbytes
            if not place:
                reasons[key] = entry.because
    rows = [
        Excess(kind=kind, owner=owner, held=n[0], certified=n[1],
               because=reasons.get((kind, owner), ""))
        for (kind, owner), n in sums.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.excess))


def describe_drift(drift: Drift, step: int, room: int | None) -> str:
    """One sentence: what, where, who, and how far the limit is.

    step: the steps done, 0 before the first one. room: bytes left below the limit.
    """
    when = f"after step {step}" if step else "before the first step"
    line = (
        f"{drift.name} {when} holds {units.show_bytes(drift.measured)},"
        f" {units.show_bytes(drift.excess)} above the certified"
        f" {units.show_bytes(drift.certified)}: "
    )
    line += drift.component or "nobody watched who holds it; a later step will be"
    if room is None:
        return line
    if room < 0:
        return f"{line}; that is {units.show_bytes(-room)} above the limit"
    return f"{line}; {units.show_bytes(room)} are left below the limit"


class Watcher:
    """Reports each drift once, and once more whenever it has doubled."""

    def __init__(self, certificate: Certificate | None, place: int = 0) -> None:
        self._certificate, self._place = certificate, place
        self._reported: dict[tuple[str, bool], int] = {}

    def look(self, counters: Counters, step: int) -> Iterator[str]:
        """What there is to say after a step."""
        if self._certificate is None:
            return
        room = self._room(counters)
        for drift in find_drift(self._certificate, counters, self._place):
            key = drift.name, bool(drift.component)
            if drift.excess >= 2 * self._reported.get(key, 0):
                self._reported[key] = drift.excess
                yield describe_drift(drift, step, room)

    @property
    def wants_names(self) -> bool:
        """Whether something has drifted whose holder nobody has watched yet."""
        named = {name for name, known in self._reported if known}
        return any(name not in named for name, _ in self._reported)

    def _room(self, counters: Counters) -> int | None:
        assert self._certificate is not None
        memory = self._certificate.memory
        if memory.usable is None:
            return None
        if counters.device_total:
            return memory.usable - counters.device_total
        beside = (memory.device_total or 0) - (memory.peak_allocated or 0)  # a process's libraries
        return memory.usable - beside - max(counters.peaks.values(), default=0)
