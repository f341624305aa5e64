"""From a ledger to the three memory numbers and a verdict against what is usable."""

from __future__ import annotations

from memfit import units
from memfit.errors import MemoryUnknown
from memfit.hardware import Device
from memfit.ledger import Kind, Ledger
from memfit.results import Memory, Verdict

# What a prediction does not know without replaying the allocator, as a stated share and band:
# SimuMax divides its peak by 0.94; contexts of 0.3 to 1.4 GiB are reported by peers.
ASSUMED_SLACK = 0.06
ASSUMED_CONTEXT = units.GIB // 2


def held(peak: int, device: Device) -> int:
    """The bytes that a predicted peak is held against the usable line with."""
    return peak if device.is_cpu else round(peak * (1 + ASSUMED_SLACK)) + ASSUMED_CONTEXT


def describe_memory(ledger: Ledger, device: Device, usable: int | None, because: str) -> Memory:
    """The JSON's `memory` object of a prediction."""
    phase = ledger.peak_phase
    peak = ledger.total(phase)
    reserved = None if device.is_cpu else round(peak * (1 + ASSUMED_SLACK))
    total = None if reserved is None else reserved + ASSUMED_CONTEXT
    least = peak if device.is_cpu else peak + ASSUMED_CONTEXT
    verdict: Verdict = "unproven"
    if usable is not None:
        verdict = "does_not_fit" if least > usable else "fits"
        if verdict == "fits" and (total or 0) > usable:
            verdict = "at_risk"
    said = because
    if total is not None:
        said += (
            f"; reserved is the allocated peak + {ASSUMED_SLACK:.0%} (assumed) and the context "
            f"{units.show_gib(ASSUMED_CONTEXT)} (assumed): `memfit certify` replays the allocator"
        )
    return Memory(
        peak_allocated=peak,
        peak_reserved=reserved,
        device_total=total,
        usable=usable,
        verdict=verdict,
        because=said,
        peak_phase=phase,
        entries=ledger.at(phase),
    )


def needs(memory: Memory) -> int:
    """The bytes that are held against the usable line; raises MemoryUnknown."""
    if memory.needed is None:
        raise MemoryUnknown(memory.because)
    return memory.needed


def describe_lack(memory: Memory, device: str) -> str:
    """One sentence naming both numbers and the largest components."""
    sums: dict[Kind, int] = {}
    for entry in memory.entries:
        sums[entry.kind] = sums.get(entry.kind, 0) + entry.nbytes
    largest = sorted(sums.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{kind} {units.show_bytes(n)}" for kind, n in largest)
    usable = units.show_bytes(memory.usable) if memory.usable is not None else "an unknown amount"
    return f"needs {units.show_bytes(needs(memory))} but `{device}` may use {usable}: {parts}"
