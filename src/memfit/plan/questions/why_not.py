"""Why a configuration that the user has in mind was not chosen: both planned, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from memfit.core import units
from memfit.core.errors import Error
from memfit.records import Record
from memfit.records.request import Request
from memfit.records.results import Plan

MOST = 4  # parts of a difference that are named
Planner = Callable[[Request], Plan]


class WhyNot(Record, frozen=True, kw_only=True):
    """The answer: the changes, their plan if there is one, and the plan that was chosen."""

    schema: int = 1
    changes: dict[str, Any]
    answer: Literal["refused", "does_not_fit", "at_risk", "unproven", "slower", "faster", "equal"]
    because: tuple[str, ...]
    requested: Plan | None
    chosen: Plan


def why_not(
    request: Request, changed: Request, changes: Mapping[str, Any], find_plan: Planner
) -> WhyNot:
    """What the changes do; keys that they leave on `auto` are decided for them, too.

    changed: the request with them. Raises Error where the request itself has no plan.
    """
    chosen = find_plan(request)
    try:
        requested = find_plan(changed)
    except Error as error:
        lines = [error.message, *([error.hint] if error.hint else [])]
        return WhyNot(
            changes=dict(changes),
            answer="refused",
            because=tuple(lines),
            requested=None,
            chosen=chosen,
        )
    return WhyNot(
        changes=dict(changes), requested=requested, chosen=chosen, **_compare(requested, chosen)
    )


def _compare(requested: Plan, chosen: Plan) -> dict[str, Any]:
    verdict = requested.memory.verdict
    if verdict != "fits" and chosen.memory.verdict == "fits":
        return {"answer": verdict, "because": tuple(_shortfall(requested, chosen))}
    if requested.recipe == chosen.recipe:
        return {"answer": "equal", "because": ("it is what was chosen",)}
    mine, its = requested.time.step_seconds, chosen.time.step_seconds
    if mine is None or its is None:
        return {"answer": "equal", "because": ("its time is unknown",)}
    if mine == its:
        return {"answer": "equal", "because": ("it takes as long",)}
    if mine < its:
        lines = "it is faster, and changes what is learned or what was asked for"
        return {"answer": "faster", "because": (lines, *_parts(requested, chosen))}
    lines = f"{mine / its - 1:.1%} slower: {_seconds(mine)} a step, the chosen one {_seconds(its)}"
    return {"answer": "slower", "because": (lines, *_parts(requested, chosen))}


def _seconds(seconds: float) -> str:
    return units.show_seconds(seconds)


def _shortfall(requested: Plan, chosen: Plan) -> list[str]:
    """How much is missing, and of what it takes more than the chosen one."""
    memory = requested.memory
    needs = memory.needed
    lines = [memory.because]
    if needs is not None and memory.usable is not None:
        over = needs - memory.usable
        word = "more than there is" if over > 0 else "within, but not at the high end of its band"
        lines = [f"needs {units.show_bytes(needs)}: {units.show_bytes(abs(over))} {word}"]
    mine, its = (_kinds(plan) for plan in (requested, chosen))
    more = sorted(((mine.get(k, 0) - its.get(k, 0), k) for k in {*mine, *its}), reverse=True)
    for nbytes, kind in more[:MOST]:
        if nbytes > 0:
            lines.append(f"{kind}: {units.show_bytes(nbytes)} more than the chosen one")
    return lines


def _kinds(plan: Plan) -> dict[str, int]:
    """Bytes at the peak by kind."""
    found: dict[str, int] = {}
    for entry in plan.memory.entries:
        found[str(entry.kind)] = found.get(str(entry.kind), 0) + entry.nbytes
    return found


def _parts(requested: Plan, chosen: Plan) -> list[str]:
    """Where the seconds differ, the most first."""
    mine, its = ({s.op: s.duration for s in plan.timeline.spans} for plan in (requested, chosen))
    differences = sorted(
        ((mine.get(op, 0.0) - its.get(op, 0.0), op) for op in {*mine, *its}),
        key=lambda pair: -abs(pair[0]),
    )
    floor = 1e-3 * max(sum(mine.values()), 1e-12)
    return [
        f"{op.replace('_', ' ')}: {_seconds(abs(by))} {'more' if by > 0 else 'less'}"
        for by, op in differences[:MOST]
        if abs(by) > floor
    ]
