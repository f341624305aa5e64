"""What would make a request fit that does not: each way is planned as the user would type it.

Tried are what leaves the result alone (knobs that the request states and the planner could decide,
the host's memory, a higher limit, more devices, another device) and what changes it (adapters, a
base in fewer bits, shorter rows). Of each kind the first that fits is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from memfit import catalog
from memfit.base_formats import find_base_format, is_quantised, offered_formats
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.core.errors import Error
from memfit.core.wording import as_yaml
from memfit.objectives import find_objective
from memfit.plan.request.problem import find_device
from memfit.plan.search.candidates import node_size
from memfit.records import to_data
from memfit.records.hardware import Device
from memfit.records.ledger import Kind
from memfit.records.recipe import OWN_STEP
from memfit.records.request import Request, change
from memfit.records.results import Plan, WayOut

Planner = Callable[[Request], Plan | None]  # None: nothing fits
MOST = 6  # ways that are kept
MOST_DEVICES = 1024
MOST_TRIED = 4  # device counts, and larger devices, that are planned
SHORTEST, SHORTEST_ANSWER = 512, 128  # tokens of a row, and of a sampled answer
HEADROOM = 1.02  # of a limit above what the nearest miss needs
STATIC = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)  # what devices can divide
# exact knobs that a request may have stated, and what leaves them to the planner
STATED: dict[str, Any] = {
    "micro_batch": "auto", "recompute": "auto", "loss": "auto", "lean": "auto",
    "optimizer.implementation": "auto",
}  # fmt: skip
OPTIONS = {"hardware.device": "--device", "limits.memory": "--memory"}


class Attempt(NamedTuple):
    """One change to try."""

    kind: Literal["knobs", "offload", "method", "rows", "limit", "devices", "device"]
    title: str
    changes: dict[str, Any]


def find_ways_out(request: Request, nearest: Plan, find_plan: Planner) -> tuple[WayOut, ...]:
    """The changes under which a request fits, the cheapest first.

    nearest: its plan, which does not fit or is at risk. find_plan: of a request; an error counts as
    no way out.
    """
    if nearest.memory.verdict not in ("does_not_fit", "at_risk"):
        return ()
    found: list[WayOut] = []
    for most, attempts in (
        (1, _knobs(request)), (1, _offloads(request)), (1, _limits(request, nearest)),
        (1, _in_flight(nearest)),
        (2, _methods(request, nearest)), (1, _counts(request, nearest)),
        (1, _larger(request, nearest)), (1, _rows(request, nearest)),
    ):  # fmt: skip
        own: list[WayOut] = []
        for attempt in attempts:
            way = _try(request, attempt, find_plan)
            if way is not None:
                own.append(way)
            if len(own) == most:
                break
        found += own
    found.sort(key=_cost)
    return tuple(found[:MOST])


def _cost(way: WayOut) -> tuple[float, float]:
    unknown = float("inf")
    usd, seconds = way.usd, way.total_seconds
    return (unknown if usd is None else usd, unknown if seconds is None else seconds)


def _try(request: Request, attempt: Attempt, find_plan: Planner) -> WayOut | None:
    """The way out where its plan fits for certain."""
    try:
        changed = change(request, attempt.changes)
        plan = find_plan(changed)
    except Error:
        return None
    if plan is None or plan.memory.verdict != "fits" or plan.memory.peak_allocated is None:
        return None
    exact = attempt.kind in ("knobs", "offload", "limit", "devices", "device")
    return WayOut(
        kind=attempt.kind,
        title=attempt.title,
        changes=attempt.changes,
        options=type_options(attempt.changes),
        label=plan.label,
        peak_allocated=plan.memory.peak_allocated,
        device_total=plan.memory.device_total,
        usable=plan.memory.usable,
        devices=changed.devices,
        step_seconds=plan.time.step_seconds,
        total_seconds=plan.time.total_seconds,
        usd=plan.cost.usd,
        exact=exact and "task.global_batch" not in attempt.changes,
        because=_spare(plan),
    )


def _spare(plan: Plan) -> str:
    needs, usable = plan.memory.needed, plan.memory.usable
    if needs is None or usable is None:
        return "fits"
    return f"fits with {units.show_bytes(usable - needs)} to spare"


def type_options(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Changes as options of a command, one word each; unquoted."""
    words: list[str] = []
    for key, value in changes.items():
        option = OPTIONS.get(key)
        words += [option, str(value)] if option else ["--set", f"{key}={as_yaml(value)}"]
    return tuple(words)


def _knobs(request: Request) -> Iterator[Attempt]:
    """Without what the request states of how a step is computed."""
    data = to_data(request)
    changes = {}
    for key, left in STATED.items():
        value: Any = data
        for part in key.split("."):
            value = value[part]
        if value != left:
            changes[key] = left
    if changes:
        yield Attempt("knobs", f"{', '.join(changes)} left to the planner", changes)


def _offloads(request: Request) -> Iterator[Attempt]:
    if request.offload != "none" or find_device(request.hardware.device).is_cpu:
        return
    if request.devices == 1:
        yield Attempt("offload", "what can wait, in the host's memory", {"offload": "auto"})
    elif not find_objective(request.task.objective).samples:
        yield Attempt("offload", "shards in the host's memory", {"offload": "parameters"})


def _in_flight(nearest: Plan) -> Iterator[Attempt]:
    """Fewer answers at once, in more waves: a half, a quarter, ... of what they are."""
    recipe = nearest.recipe
    if not recipe.samples:
        return
    rows = recipe.rollout.in_flight(recipe.own_rows) // 2
    while rows:
        title = f"{rows} answers in flight" if rows > 1 else "one answer in flight"
        yield Attempt("knobs", title, {"rollout.rows": rows})
        rows //= 2


def _limits(request: Request, nearest: Plan) -> Iterator[Attempt]:
    """A limit that is lower than what the device has."""
    limit, memory = request.limits.memory_bytes, find_device(request.hardware.device).memory
    needs = nearest.memory.total_high or nearest.memory.needed
    if limit is None or memory is None or needs is None or request.devices > 1:
        return
    for factor in (HEADROOM, HEADROOM**3):
        size = -(-int(needs * factor) // (units.GIB // 4)) * (units.GIB // 4)
        if limit < size <= memory:
            text = f"{size / units.GIB:g} GiB"
            yield Attempt("limit", f"a limit of {text}", {"limits.memory": text})


def _methods(request: Request, nearest: Plan) -> Iterator[Attempt]:
    """Adapters, over a base in ever fewer bits.

    Under `auto` memfit's own step has tried LoRA already; of others `auto` is their default, full.
    """
    untried = request.method == "auto" and request.framework != OWN_STEP
    if request.method == "full" or (untried and nearest.recipe.method == "full"):
        yield Attempt("method", "LoRA", {"method": "lora"})
    offered = offered_formats()
    fewest = min(find_base_format(base).bits for base in offered)
    if is_quantised(request.base_format) and find_base_format(request.base_format).bits <= fewest:
        return
    for base in offered:
        if base != request.base_format:
            changes = {"base_format": base}
            if request.method not in ("lora", "dora"):
                changes = {"method": "lora", **changes}
            yield Attempt("method", f"LoRA over a base in {base}", changes)


def _counts(request: Request, nearest: Plan) -> Iterator[Attempt]:
    """More of the same device, from the fewest on that could hold what devices divide."""
    device = find_device(request.hardware.device)
    if device.is_cpu or request.hardware.device == "auto":
        return
    usable = nearest.memory.usable
    held = _held(request, nearest)
    tried, count = 0, 2 * request.devices
    while count <= MOST_DEVICES and tried < MOST_TRIED:
        if usable is None or held <= usable * count:
            tried += 1
            yield from _of_count(request, device, count)
        count *= 2


def _of_count(request: Request, device: Device, count: int) -> Iterator[Attempt]:
    node = node_size(device)
    changes: dict[str, Any] = {"hardware.count": min(count, node)}
    if count > node or request.hardware.nodes > 1:
        changes["hardware.nodes"] = max(1, count // node)
    if request.parallel != "auto":
        changes["parallel"] = "auto"
    title = f"{count} x {device.id}"
    yield Attempt("devices", title, changes)
    batch = request.global_batch
    if batch % count:  # a row a device is the least where rows cannot share products
        whole = -(-batch // count) * count
        more = {**changes, "task.global_batch": whole}
        yield Attempt("devices", f"{title}, a global batch of {whole}", more)


def _larger(request: Request, nearest: Plan) -> Iterator[Attempt]:
    """Devices that hold what the nearest miss needs, the cheapest hour first; then the smallest."""
    own, needs = find_device(request.hardware.device), nearest.memory.needed
    limit = request.limits.memory_bytes
    if needs is None or (limit is not None and limit < needs):
        return
    found = []
    for device in catalog.devices():
        memory, same = device.memory, device.platform == own.platform
        if device.is_cpu or memory is None or memory < needs or not (same or own.is_cpu):
            continue
        if own.memory is not None and memory <= own.memory:
            continue
        price = choose_price(device, "").usd_per_hour
        known = bool(device.flops) and device.bandwidth is not None
        if known:
            found.append((float("inf") if price is None else price, memory, device.id))
    for _, _, name in sorted(found)[:MOST_TRIED]:
        changes: dict[str, Any] = {"hardware.device": name}
        if request.hardware.price:
            changes["hardware.price"] = "on-demand"
        yield Attempt("device", name, changes)


def _held(request: Request, nearest: Plan) -> int:
    """Bytes of weights, gradients and states of all devices, at the nearest miss's peak."""
    ledger = nearest.ledger
    at_peak = ledger.by_kind(ledger.peak_phase) if ledger.entries else {}
    return sum(at_peak.get(kind, 0) for kind in STATIC) * request.devices


def _rows(request: Request, nearest: Plan) -> Iterator[Attempt]:
    """Shorter rows: a half, a quarter, ... of what they are; of sampled answers, shorter ones."""
    usable = nearest.memory.usable
    if usable is not None and _held(request, nearest) > usable * request.devices:
        return  # what does not depend on rows is too much alone
    key, what, longest = "task.sequence_length", "rows", nearest.recipe.sequence_length
    shortest = SHORTEST
    if nearest.recipe.samples:
        key, what = "rollout.max_completion_length", "answers"
        longest, shortest = nearest.recipe.rollout.max_completion_length, SHORTEST_ANSWER
    length = longest // 2
    while length >= shortest:
        yield Attempt("rows", f"{what} of {length:,} tokens", {key: length})
        length //= 2
