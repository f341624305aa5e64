"""Limits of time and money: what the fastest plan may not exceed."""

from __future__ import annotations

from memfit.core import units
from memfit.core.errors import DoesNotFit
from memfit.records.results import Plan

HINT = "`memfit plan --devices A:8,B:64` compares other devices"


def find_excess(plan: Plan) -> DoesNotFit | None:
    """The error of a plan that takes longer, or costs more, than its request allows.

    None within the limits, and where the time or the price is unknown: see `find_unjudged`.
    """
    time, cost, limits = plan.time.total_seconds, plan.cost.usd, plan.request.limits
    devices = f"{plan.request.devices} x {plan.recipe.device}"
    if plan.recipe.samples:
        devices += " with answers as long as they may be"
    if limits.seconds is not None and time is not None and time > limits.seconds:
        return DoesNotFit(
            f"the fastest plan takes {units.show_seconds(time)} on {devices}, and `limits.time` is"
            f" {limits.time}",
            hint=HINT,
        )
    if limits.usd is not None and cost is not None and cost > limits.usd:
        return DoesNotFit(
            f"the fastest plan costs {cost:,.2f} USD on {devices}, and `limits.cost` is"
            f" {limits.cost}",
            hint=HINT,
        )
    return None


def find_unjudged(plan: Plan) -> tuple[str, ...]:
    """Limits that nothing is known to hold against, in words."""
    limits, found = plan.request.limits, []
    if limits.seconds is not None and plan.time.total_seconds is None:
        found.append(f"`limits.time: {limits.time}` is not judged: the run's time is unknown")
    if limits.usd is not None and plan.cost.usd is None:
        found.append(f"`limits.cost: {limits.cost}` is not judged: the run's cost is unknown")
    return tuple(found)
