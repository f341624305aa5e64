"""From a ledger to the three memory numbers and a verdict against what is usable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from memfit.allocator.settings import read_settings
from memfit.catalog.overheads import find_outside
from memfit.core import units
from memfit.core.errors import MemoryUnknown
from memfit.parallelism.pipeline import owner_of
from memfit.parallelism.shards import cut_model
from memfit.plan.frameworks import Slack
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Ledger
from memfit.records.model import Model
from memfit.records.recipe import Parallel, Recipe
from memfit.records.reinforcement import Rollout
from memfit.records.results import Memory, Verdict

SLACK = Slack(  # of a step whose run is not simulated event by event
    low=1.0, typical=1.04, high=1.12,
    source="assumed, as this step is not replayed",
)  # fmt: skip
REPLAY = Slack(  # of the replay of a simulated run, over the certificate's
    low=0.999, typical=1.0, high=1.001,
    source="the simulated run, replayed through the caching allocator",
)  # fmt: skip

SAMPLED = Slack(  # where answers are sampled: those of other lengths leave other gaps
    low=0.985, typical=1.0, high=1.065,
    source="the simulated run, replayed through the caching allocator; with shorter answers in"
    " between, certificates reserve from 1.1 % less to 2.6 % more, and an H100 with torch 2.11,"
    " which frees some gradients later, reserved 6.3 % more",
)  # fmt: skip
# scores of a row that CUDA sorts where they lie (aten/src/ATen/native/cuda/Sort.h)
SORTED_IN_PLACE = 4096


def doubt_sampled(recipe: Recipe, device: Device, memory: Memory, done: str) -> Memory:
    """The verdict where answers are sampled, whose lengths leave gaps between whole segments, and
    where torch sorts a vocabulary on a GPU, in memory of its own.

    done: what was done with the lengths that were looked at, `replayed` or `traced`.
    """
    if not recipe.samples or device.is_cpu or memory.verdict != "fits":
        return memory
    doubts = []
    if not read_settings(recipe.allocator).expandable_segments:
        doubts.append(
            f"answers of other lengths than those {done} may leave more unused:"
            " `allocator: expandable_segments:True` leaves little"
        )
    if sort := _find_sort(recipe.rollout):
        doubts.append(f"what torch's sort of the vocabulary takes for {sort} is not counted")
    if not doubts:
        return memory
    return replace(memory, verdict="at_risk", because="; ".join((memory.because, *doubts)))


def _find_sort(rollout: Rollout) -> str:
    """What sorts more scores of a row than a kernel sorts in place; "": nothing does."""
    if rollout.top_k > SORTED_IN_PLACE:
        return f"`rollout.top_k` above {SORTED_IN_PLACE:,}"
    if rollout.top_p < 1 and not rollout.top_k:
        return f"`rollout.top_p` (a `rollout.top_k` of {SORTED_IN_PLACE:,} or less takes nothing)"
    return ""


class Needed(NamedTuple):
    """The bytes of a device that a peak needs: a band, `low` to `high`, around `total`.

    Without a context on record the band has no upper end, and `total` is unknown.
    """

    reserved: int
    low: int
    total: int | None
    high: int | None
    because: str

    def against(self, *, tight: bool) -> int:
        """What is held against the usable line: all of the band, or where `tight`, its middle."""
        found = self.total if tight else self.high
        return self.reserved if found is None else found


def find_streams(model: Model, recipe: Recipe, device: Device) -> int:
    """Bytes in pools of the streams of collectives beside a peak that has none of them.

    model: after its adapter. Buffers are gathered and reduced on streams of their own, whose pools
    no other stream takes from: a gathered unit and the next one, and this rank's gradients, in the
    largest case. Gradients that wait on the host leave their pool to the next unit's.
    """
    parallel = recipe.parallel
    if parallel.world == 1 or device.is_cpu:
        return 0
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
    return 2 * max(units.values()) * (parallel.shards > 1) + max(gradients.values())


def widen(slack: Slack, reserved: int, others: Sequence[int]) -> Slack:
    """The same slack around all that is reserved where addresses come in other orders, too.

    others: bytes that these reserve (`allocator.orders`).
    """
    low, high = min((reserved, *others)), max((reserved, *others))
    if low == high:
        return slack
    return Slack(
        low=slack.low * low / reserved, typical=slack.typical, high=slack.high * high / reserved,
        source=f"{slack.source}, {describe_orders(low, high)}",
    )  # fmt: skip


def describe_orders(low: int, high: int) -> str:
    """The range that other orders of addresses leave, in words."""
    span = f"{units.show_gib(low)} to {units.show_gib(high)}"
    return f"{span} by the order in which the driver gives addresses"


def find_needed(
    slack: Slack, base: int, device: Device, parallel: Parallel, beside: int = 0
) -> Needed:
    """The band of a CUDA device's bytes: `base` times the slack, what is `beside` it in pools of
    other streams, and what is outside the allocator."""
    outside = find_outside(device, parallel)
    low, typical, high = (
        round(base * share) + beside for share in (slack.low, slack.typical, slack.high)
    )
    because = slack.source
    if beside:
        because += f", and {units.show_gib(beside)} in pools of collectives' streams"
    context = "the context" if parallel.world == 1 else "the context with NCCL's communicators"
    if outside is None:
        return Needed(typical, low, None, None, f"{because}; {context} is unknown")
    return Needed(
        reserved=typical, low=low + outside.low, total=typical + outside.typical,
        high=high + outside.high, because=f"{because}; {context} is {outside.because}",
    )  # fmt: skip


def judge(needed: Needed, usable: int | None) -> Verdict:
    """`fits` where the whole band fits, `does_not_fit` where none of it does."""
    if usable is None:
        return "unproven"
    if needed.low > usable:
        return "does_not_fit"
    if needed.high is None:
        return "unproven"
    return "fits" if needed.high <= usable else "at_risk"


def describe_memory(
    ledger: Ledger, device: Device, usable: int | None, because: str, needed: Needed | None = None
) -> Memory:
    """The JSON's `memory` object of a prediction; needed: of a CUDA device, see `find_needed`."""
    phase = ledger.peak_phase
    peak = ledger.total(phase)
    if needed is None or device.is_cpu:
        verdict: Verdict = "unproven"
        if usable is not None:
            verdict = "does_not_fit" if peak > usable else "fits"
        return Memory(
            peak_allocated=peak, peak_reserved=None, device_total=None, usable=usable,
            verdict=verdict, because=because, peak_phase=phase, entries=ledger.at(phase),
        )  # fmt: skip
    return Memory(
        peak_allocated=peak,
        peak_reserved=needed.reserved,
        device_total=needed.total,
        total_low=needed.low if needed.total is not None else None,
        total_high=needed.high,
        usable=usable,
        verdict=judge(needed, usable),
        because=f"{because}; reserved: {needed.because}",
        peak_phase=phase,
        entries=ledger.at(phase),
    )


def needs(memory: Memory) -> int:
    """The bytes that are held against the usable line; raises MemoryUnknown."""
    if memory.needed is None:
        raise MemoryUnknown(memory.because)
    return memory.needed


def describe_shortfall(memory: Memory, device: str) -> str:
    """One sentence naming both numbers and the largest components."""
    sums: dict[Kind, int] = {}
    for entry in memory.entries:
        sums[entry.kind] = sums.get(entry.kind, 0) + entry.nbytes
    largest = sorted(sums.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{kind} {units.show_bytes(n)}" for kind, n in largest)
    usable = units.show_bytes(memory.usable) if memory.usable is not None else "an unknown amount"
    return f"needs {units.show_bytes(needs(memory))} but `{device}` may use {usable}: {parts}"
