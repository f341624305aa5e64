"""Memory of a step whose framework's file describes its bytes: a ledger, a band, a verdict."""

from __future__ import annotations

from memfit.core.units import show_gib
from memfit.plan.frameworks import Job, find_framework
from memfit.plan.memory.bounds import find_bounds
from memfit.records.hardware import Device
from memfit.records.ledger import Ledger
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.records.results import Memory, Verdict


def predict_ledger(recipe: Recipe, model: Model, device: Device) -> Ledger:
    """Allocated bytes of the fullest rank, by phase and kind; model: before any adapter.

    Raises MemoryUnknown where the framework's file describes no bytes, and InvalidRequest.
    """
    job = Job(model=model, recipe=recipe, device=device)
    framework = find_framework(recipe.framework)
    framework.check(job)
    return framework.predict(job)


def find_waiting(recipe: Recipe, model: Model, device: Device) -> tuple[int, str]:
    """Return bytes reserved beside the peak's and released on demand; model: without adapters."""
    job = Job(model=model, recipe=recipe, device=device)
    return find_framework(recipe.framework).waiting(job)


def find_on_host(recipe: Recipe, model: Model, device: Device) -> int:
    """Bytes in the memory of all hosts; model: before any adapter."""
    if recipe.offload == "none":
        return 0
    job = Job(model=model, recipe=recipe, device=device)
    return find_framework(recipe.framework).on_host(job)


def describe_unknown(usable: int | None, because: str) -> Memory:
    """The same where no bytes are described; because: why not."""
    return Memory(
        peak_allocated=None, peak_reserved=None, device_total=None, usable=usable,
        verdict="unproven", because=because, peak_phase="", entries=(),
    )  # fmt: skip


def describe_ledger(
    ledger: Ledger,
    recipe: Recipe,
    device: Device,
    usable: int | None,
    waiting: tuple[int, str] = (0, ""),
) -> Memory:
    """The three numbers and a verdict; reserved and context are bands, and the verdict sees both.

    `fits` at the high ends, `at_risk` between, `does_not_fit` at the low ends; where no context is
    known, only `does_not_fit` can be. waiting: as `find_waiting` says; where less is free, less.
    """
    framework, peak = find_framework(recipe.framework), ledger.peak
    slack, bounds = framework.slack, find_bounds(framework, device, recipe.parallel, peak)
    live = {p: ledger.live(p) for p in ledger.phases}
    peak_phase = max(live, key=live.__getitem__)
    verdict: Verdict = "unproven"
    if usable is not None and peak * framework.slack.low > usable:
        verdict = "does_not_fit"  # whatever the context is
    elif usable is not None and bounds.outside is not None:
        verdict = "fits"
        if bounds.high > usable:
            verdict = "at_risk"
        if bounds.low > usable:
            verdict = "does_not_fit"
    reason = (
        f"{framework.title}: read from {framework.source}; reserved is allocated x"
        f" {slack.typical:.3f} ({slack.low:.3f} to {slack.high:.3f}: {slack.source})"
    )
    outside, (waits, why) = bounds.outside, waiting
    if usable is not None:
        waits = min(waits, max(0, usable - (bounds.total or bounds.reserved)))
    if waits:
        reason += f"; beside it {show_gib(waits)} of {why}, given back before memory runs out"
    reason += f"; context {outside.because}" if outside else "; the context is unknown"
    if (doubt := framework.doubt(recipe)) and verdict != "does_not_fit":
        verdict, reason = "unproven", f"{doubt}; {reason}"
    if assumed := device.describe_assumed(usable):
        reason += f"; the limit is {assumed}"
    return Memory(
        peak_allocated=live[peak_phase],
        peak_reserved=bounds.reserved + waits,
        device_total=None if bounds.total is None else bounds.total + waits,
        total_low=None if bounds.low is None else round(bounds.low),
        total_high=None if bounds.high is None else round(bounds.high),
        usable=usable,
        verdict=verdict,
        because=reason,
        peak_phase=ledger.peak_phase,
        entries=ledger.at(ledger.peak_phase),
    )
