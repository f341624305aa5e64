"""From live tensors to a process: what a limit on a CPU, such as a container's, is held against.

The process that trains holds its imports, its tensors, what each tensor is rounded up, and what
threads and operators keep, and the gaps of a heap that keeps what is freed. The one that plans and
certifies is gone before that; of a small model it is the larger of the two.
"""

from __future__ import annotations

from memfit.allocator.heap import Held
from memfit.catalog.overheads import find_overhead, find_preparing, find_working
from memfit.core import units
from memfit.plan.memory.verdict import Needed, judge
from memfit.records.hardware import Device
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.results import Memory

# Tensors of 128 KiB and more are mapped in whole pages with a header: up to 4 % of the smallest.
ROUNDED = (1.0, 1.005, 1.04)
# Gaps that C++ objects leave in a heap that is kept, in blocks as large as its largest: a hole that
# is cut by a few bytes does not take the next one (bench/kept_heap.py, docs/LOG.md).
SCATTERED = (0, 4, 8)
# At least this share of the heap: the demo's, whose largest block is a fortieth of it, kept 0.6
# beside the tensors (docs/LOG.md).
SCATTERED_SHARE = (0.0, 0.0, 0.7)


def find_process(
    peak: int, device: Device, *, prepared: bool = True, held: Held | None = None
) -> Needed:
    """Of a peak of live tensors on a CPU; prepared: planning and certifying share the limit.

    held: what the heap comes to, where it keeps freed blocks (`allocator.heap`).
    """
    imports, working = find_overhead(device), find_working(device)
    preparing = find_preparing(device)
    assert imports is not None
    assert working is not None
    assert preparing is not None

    def train(place: int) -> int:
        tensors = round(peak * ROUNDED[place])
        if held is not None:
            share = round(SCATTERED_SHARE[place] * held.heap)
            gaps = max(SCATTERED[place] * held.largest, share)
            tensors = max(held.heap + held.mapped + gaps, tensors) if place else tensors
        return imports[place] + working[place] + tensors

    def prepare(place: int) -> int:
        return imports[place] + preparing[place] if prepared else 0

    low, total, high = (max(train(place), prepare(place)) for place in range(3))
    because = f"interpreter and imported libraries {imports.because}"
    if train(1) >= prepare(1):
        because += f"; threads, heap and log {units.show_bytes(working.typical)}"
        if held is not None:
            gaps = held.heap + held.mapped + SCATTERED[1] * held.largest - peak
            because += f"; freed blocks that are kept, and gaps, {units.show_bytes(gaps)}"
    else:
        because += "; planning and certifying hold more before training begins than training does"
    return Needed(reserved=peak, low=low, total=total, high=high, because=because)


def describe_process(
    ledger: Ledger, device: Device, usable: int | None, because: str, *, prepared: bool = True,
    held: Held | None = None,
) -> Memory:  # fmt: skip
    """The JSON's `memory` object of a run on a CPU, from its live tensors; see `find_process`."""
    phase = ledger.peak_phase
    peak = ledger.total(phase)
    found = find_process(peak, device, prepared=prepared, held=held)
    return Memory(
        peak_allocated=peak,
        peak_reserved=None,
        device_total=found.total,
        total_low=found.low,
        total_high=found.high,
        usable=usable,
        verdict=judge(found, usable),
        because=because,
        peak_phase=phase,
        entries=(*ledger.at(phase), process_entry(found, peak, phase)),
    )


def process_entry(found: Needed, peak: int, phase: Phase) -> Entry:
    """What of the process is no tensor."""
    assert found.total is not None
    nbytes = found.total - peak
    return Entry(
        kind=Kind.CONTEXT, phase=phase, owner="process", nbytes=nbytes, because=found.because
    )
