"""From a ledger to the three memory numbers and a verdict against what is usable."""

from __future__ import annotations

from typing import NamedTuple

from memfit import units
from memfit.catalog.overheads import find_outside
from memfit.errors import MemoryUnknown
from memfit.hardware import Device
from memfit.ledger import Kind, Ledger
from memfit.model import Model
from memfit.parallelism.pipeline import owner_of
from memfit.parallelism.shards import cut_model
from memfit.recipe import Parallel, Recipe
from memfit.results import Memory, Verdict

# What a prediction does not know without replaying the allocator, as a stated share and band:
# SimuMax divides its peak by 0.94; contexts of 0.3 to 1.4 GiB are reported by peers.
ASSUMED_SLACK = 0.06
ASSUMED_CONTEXT = units.GIB // 2


class Beside(NamedTuple):
    """What many ranks need of a CUDA device beside the peak itself, bytes; see `find_beside`."""

    streams: int = 0  # reserved for buffers of collectives, which have pools of their own
    communicators: int = 0  # NCCL's, outside of torch's allocator


ALONE = Beside()


def find_beside(model: Model, recipe: Recipe, device: Device) -> Beside:
    """Of this mesh; model: after its adapter.

    Buffers are gathered and reduced on streams of their own, whose pools no other stream takes
    from: a gathered unit and the next one, and this rank's gradients, in the largest case beside a
    peak that has none of them. How much of it there is only the certificate's replay knows.
    Gradients that wait on the host leave their pool to the next unit's.
    """
    parallel = recipe.parallel
    if parallel.world == 1 or device.is_cpu:
        return ALONE
    units: dict[str, int] = {}
    gradients: dict[object, int] = {}  # of each stage; on their way to the host, of each unit
    for w in cut_model(model, parallel).weights:
        unit = f"block {w.layer}" if w.layer >= 0 else w.part
        gathered = 2 * w.numel  # in 16 bits; more only where nothing is
        units[unit] = units.get(unit, 0) + gathered
        on_way = recipe.offload == "parameters"
        holder = unit if on_way else owner_of(w, model.architecture.layers, parallel)
        own = w.nbytes // parallel.shards if w.trainable else 0
        gradients[holder] = gradients.get(holder, 0) + own
    outside, alone = find_outside(device, parallel), find_outside(device, Parallel())
    known = outside is not None and alone is not None
    return Beside(
        streams=2 * max(units.values()) * (parallel.shards > 1) + max(gradients.values()),
        communicators=outside.typical - alone.typical if known and outside and alone else 0,
    )


def held(peak: int, device: Device, beside: Beside = ALONE) -> int:
    """The bytes that a predicted peak is held against the usable line with."""
    if device.is_cpu:
        return peak
    return round(peak * (1 + ASSUMED_SLACK)) + ASSUMED_CONTEXT + sum(beside)


def describe_memory(
    ledger: Ledger, device: Device, usable: int | None, because: str, beside: Beside = ALONE
) -> Memory:
    """The JSON's `memory` object of a prediction."""
    phase = ledger.peak_phase
    peak = ledger.total(phase)
    context = ASSUMED_CONTEXT + beside.communicators
    reserved = None if device.is_cpu else round(peak * (1 + ASSUMED_SLACK)) + beside.streams
    total = None if reserved is None else reserved + context
    least = peak if device.is_cpu else peak + context
    verdict: Verdict = "unproven"
    if usable is not None:
        verdict = "does_not_fit" if least > usable else "fits"
        if verdict == "fits" and (total or 0) > usable:
            verdict = "at_risk"
    said = because
    if total is not None:
        more = ""
        if any(beside):
            more = f", {units.show_gib(beside.streams)} in pools of collectives' streams"
            more += f", NCCL's communicators {units.show_gib(beside.communicators)} (published)"
        said += (
            f"; reserved is the allocated peak + {ASSUMED_SLACK:.0%} (assumed){more} and the"
            f" context {units.show_gib(ASSUMED_CONTEXT)} (assumed): `memfit certify` replays the"
            " allocator"
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
