"""One request on several offers of devices: what fits, how long it takes, what it costs, and why.

Every offer gets the best plan that memfit finds for it, of the step that the request asks for:
memfit's own unless `framework` names another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Literal

from msgspec import structs

from memfit.catalog import find_device
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.core.errors import DoesNotFit, Error, InvalidRequest
from memfit.plan.budget.offers import Offer
from memfit.plan.search.candidates import node_size
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.request import Hardware, Request
from memfit.records.results import Plan, Verdict

Objective = Literal["fastest", "cheapest", "fewest-devices"]


class Offered(Record, frozen=True, kw_only=True):
    """One offer and its best plan; None is unknown, or there is no plan."""

    offer: Offer
    framework: str  # whose step it is
    verdict: Verdict | Literal["refused"]
    recipe: str  # the chosen configuration in a line
    needs: int | None  # bytes of the fullest device
    usable: int | None
    step_seconds: float | None
    total_seconds: float | None
    device_hours: float | None
    usd: float | None  # of the whole run
    usd_per_million_tokens: float | None
    best: bool
    because: str


class Comparison(Record, frozen=True, kw_only=True):
    """All offers, the best first, then what fits, then what does not."""

    schema: int = 1
    request: Request
    objective: Objective
    rows: tuple[Offered, ...]
    plan: Plan | None  # of the best one


def place(device: Device, count: int, nodes: int = 0) -> Hardware:
    """Hardware of `count` devices: one machine where one of the usual size holds them.

    nodes: machines among which they are; 0 leaves that to the size that the catalogue names. Raises
    InvalidRequest where the devices make no whole number of machines.
    """
    if nodes:
        return Hardware(device=device.id, count=count // nodes, nodes=nodes)
    node = node_size(device)
    if count <= node:
        return Hardware(device=device.id, count=count)
    if count % node:
        raise InvalidRequest(
            f"{count} x `{device.id}` is no whole number of nodes of {node}",
            hint=f"offer {count // node * node} or {-(-count // node) * node}",
        )
    return Hardware(device=device.id, count=node, nodes=count // node)


def compare(
    request: Request,
    offers: Sequence[Offer],
    objective: Objective,
    find_plan: Callable[[Request], Plan],
) -> Comparison:
    """The best plan of each offer, in order; find_plan: of one request."""
    stated, request = request, _share_batch(request, offers)
    found: list[tuple[Offered, Plan | None]] = []
    for offer in offers:
        device = find_device(offer.device)
        try:
            hardware = place(device, offer.count, offer.nodes)
            own = structs.replace(
                hardware, grid=request.hardware.grid, load=request.hardware.load,
                pue=request.hardware.pue,
            )  # fmt: skip
            plan = find_plan(structs.replace(request, hardware=own))
        except Error as error:
            found.append((_refused(offer, request.framework, error), None))
            continue
        found.append((_offered(offer, device, plan), plan))
    order = sorted(found, key=lambda pair: _rank(pair[0], objective))
    best, plan_of_best = order[0]
    if best.verdict != "fits":
        return Comparison(
            request=stated, objective=objective, rows=tuple(row for row, _ in order), plan=None
        )
    rows = [structs.replace(best, best=True, because=_praise(objective))]
    rows += [_against(row, best, objective, _learns(p, plan_of_best)) for row, p in order[1:]]
    return Comparison(request=stated, objective=objective, rows=tuple(rows), plan=plan_of_best)


def _share_batch(request: Request, offers: Sequence[Offer]) -> Request:
    """The same with a global batch that the devices of every offer can share, so that a step is
    the same work on each."""
    together = structs.replace(request.hardware, count=lcm(*(o.count for o in offers)), nodes=1)
    batch = structs.replace(request, hardware=together).global_batch
    return structs.replace(request, task=structs.replace(request.task, global_batch=batch))


def _refused(offer: Offer, framework: str, error: Error) -> Offered:
    return Offered(
        offer=offer, framework=framework,
        verdict="does_not_fit" if isinstance(error, DoesNotFit) else "refused", recipe="",
        needs=None, usable=None, step_seconds=None, total_seconds=None, device_hours=None,
        usd=None, usd_per_million_tokens=None, best=False, because=error.message,
    )  # fmt: skip


def _offered(offer: Offer, device: Device, plan: Plan) -> Offered:
    memory, time, cost = plan.memory, plan.time, plan.cost
    needs = memory.needed
    price = choose_price(device, plan.request.hardware.price).usd_per_hour
    each = None
    if price is not None and time.tokens_per_second:
        each = 1e6 * offer.count * price / units.HOUR / time.tokens_per_second
    because = ""
    if memory.verdict == "does_not_fit" and needs is not None and memory.usable is not None:
        because = f"needs {units.show_bytes(needs - memory.usable)} more than a device has"
    elif memory.verdict != "fits":
        because = "fits only at the low end of what is not known"
    return Offered(
        offer=offer, framework=plan.recipe.framework, verdict=memory.verdict, recipe=plan.label,
        needs=needs, usable=memory.usable, step_seconds=time.step_seconds,
        total_seconds=time.total_seconds, device_hours=cost.device_hours, usd=cost.usd,
        usd_per_million_tokens=each, best=False, because=because,
    )  # fmt: skip


def _figure(row: Offered, objective: Objective) -> float | None:
    """What the objective minimises; None is unknown."""
    if objective == "cheapest":
        return row.usd_per_million_tokens
    return float(row.offer.count) if objective == "fewest-devices" else row.step_seconds


def _rank(row: Offered, objective: Objective) -> tuple[float, ...]:
    verdicts = {"fits": 0, "at_risk": 1, "unproven": 2, "does_not_fit": 3, "refused": 4}
    unknown = float("inf")
    figure, seconds = _figure(row, objective), row.step_seconds
    return (
        verdicts[row.verdict],
        unknown if figure is None else figure,
        unknown if seconds is None else seconds,
    )


def _praise(objective: Objective) -> str:
    return {
        "fastest": "the fastest that fits",
        "cheapest": "the cheapest that fits",
        "fewest-devices": "the fewest devices on which it fits",
    }[objective]


def _learns(plan: Plan | None, best: Plan | None) -> str:
    """Where a plan's result of training is another than the best one's."""
    if plan is None or best is None:
        return ""
    mine, its = ((p.recipe.method, p.recipe.precision) for p in (plan, best))
    return f"{' '.join(mine)} learns otherwise than {' '.join(its)}" if mine != its else ""


def _against(row: Offered, best: Offered, objective: Objective, learns: str) -> Offered:
    """A row with what it loses by, and what it gains."""
    if row.verdict != "fits":
        return row
    notes = [learns] if learns else []
    for name, mine, its in (
        ("time", row.step_seconds, best.step_seconds),
        ("cost", row.usd_per_million_tokens, best.usd_per_million_tokens),
    ):
        if mine is None or its is None:
            notes.append(f"{name} unknown")
        elif mine != its:
            notes.append(f"{mine / its:.2f}x the {name}")
    if objective == "fewest-devices":
        notes.append(f"{row.offer.count} devices")
    return structs.replace(row, because=", ".join(notes) or "equal")
