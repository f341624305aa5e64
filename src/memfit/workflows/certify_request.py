"""Certify a recipe, and what would change its verdict: every lever, the nearest one that fits.

Nothing here is a prediction: the search proposes, and what is named has been certified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memfit.core.errors import Error, InvalidRequest
from memfit.plan.memory.verdict import needs
from memfit.plan.request import problem as problems
from memfit.plan.search import search
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.levers import EXACT, changed, knobs, turn
from memfit.records import to_data
from memfit.records.hardware import Device
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Certificate, Lever, Nearest, Plan
from memfit.workflows.load_inputs import change

# what a request may state and the search could decide, those that change no result first
LOOSENED: tuple[tuple[str, ...], ...] = (
    ("recompute",), ("micro_batch",), ("loss", "loss_chunk"), ("optimizer.implementation",),
    ("optimizer.in_backward",), ("attention",), ("lean",), ("precision", "base_format"),
    ("method",),
)  # fmt: skip
SURE, POSSIBLE = ("fits",), ("fits", "at_risk", "unproven")
TRIES = 3  # proposals certified of each number of knobs loosened


def certify(
    recipe: Recipe,
    *,
    usable: int | None = None,
    request: Request | None = None,
    tape: Path | None = None,
    rank: int | None = None,
    stages: bool = False,
    imports: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Run the recipe's own step on fake tensors of its device; raises NotCertified.

    With a request that names data, on shapes that bound all micro-batches of that data; else on
    the rows of `shapes.bounds_of`. tape: where a `certify.recording` is written, for
    `write_timeline`. rank: of the recipe's mesh; None certifies the fullest. stages: of a pipeline,
    with what its other stages hold. imports: bytes
    measured that a run on this CPU holds before its first tensor; None measures them in the process
    that certifies. say: called with how far the data is tokenised, where that takes a while.
    """
    from memfit import certify as certification

    problems.check_own_step(recipe.framework)
    device = _device_of(recipe)
    if imports is not None:
        device = device.with_context(imports)
    data = held_out = None
    if request is not None and request.task.data:
        from memfit.train.data.prepare import find_bounds

        data, held_out = find_bounds(request, recipe, say=say)
    return certification.certify(
        recipe, device, usable, data=data, held_out=held_out, tape=tape, rank=rank, stages=stages
    )


def _device_of(recipe: Recipe) -> Device:
    return problems.find_device("cpu" if recipe.device == "cpu-x86" else recipe.device)


def prove(recipes: Sequence[Recipe], usable: int | None) -> list[Certificate | Error]:
    """Each recipe's certificate, or why there is none; all in one process beside this one."""
    from memfit import certify as certification

    if not recipes:
        return []
    device = _device_of(recipes[0])
    orders = [certification.Order(recipe=r, device=device, usable=usable) for r in recipes]
    return certification.certify_all(orders)


def find_levers(request: Request, proof: Certificate) -> tuple[Lever, ...]:
    """The certified recipe with one knob turned, each certified; what removes most comes first.

    request: the one that the recipe was made of, for one device or for many.
    """
    ways = list(turn(problems.read_own_problem(request), proof.recipe))
    proofs = prove([way.recipe for way in ways], proof.memory.usable)
    pairs = zip(ways, proofs, strict=True)
    rows = [_lever(way.changes, proof, other) for way, other in pairs]
    return tuple(sorted(rows, key=lambda row: -(row.removed if row.removed is not None else -1e30)))


def _lever(changes: dict[str, Any], proof: Certificate, other: Certificate | Error) -> Lever:
    exact = set(changes) <= set(EXACT)
    if isinstance(other, Error):
        return Lever(
            changes=changes, peak_allocated=None, device_total=None, removed=None, verdict=None,
            exact=exact, because=other.message,
        )  # fmt: skip
    found, own = other.memory, proof.memory.peak_allocated
    return Lever(
        changes=changes,
        peak_allocated=found.peak_allocated,
        device_total=found.device_total,
        removed=None if own is None or found.peak_allocated is None else own - found.peak_allocated,
        verdict=found.verdict,
        exact=exact,
        because=f"its peak is in {found.peak_phase}",
    )


def find_nearest(plan: Plan, proof: Certificate | None) -> Nearest | None:
    """The recipe nearest to a request that does not fit, or the smallest found.

    The search is repeated with one or two of the stated knobs left open; proof: the certificate
    that refuted the plan, whose excess is taken off the limit. First for
    what surely fits, with the whole band; then for what may. None where nothing
    is to be searched: no limit is known, or nothing else can be planned.
    """
    limit = _limit(plan, proof)
    if limit is None:
        return None
    misses: list[Plan] = []
    for accepted in (SURE, POSSIBLE):
        for number in range(3):
            ways = list(_ways(plan.request, number))
            proposals = _propose(plan, ways, limit, tight=accepted is POSSIBLE)
            misses += [made for made in proposals if made.memory.verdict == "does_not_fit"]
            fitting = [made for made in proposals if made.memory.verdict != "does_not_fit"]
            for made in sorted(fitting, key=lambda made: _distance(plan, made))[:TRIES]:
                (found,) = prove([made.recipe], plan.memory.usable)
                if isinstance(found, Certificate) and found.memory.verdict in accepted:
                    return _name(plan, made, found)
                misses.append(made)
        if _device_of(plan.recipe).is_cpu:
            break  # no band
    smallest = min([plan, *misses], key=lambda made: needs(made.memory))
    (found,) = prove([smallest.recipe], plan.memory.usable)
    return _name(plan, smallest, found) if isinstance(found, Certificate) else None


def _limit(plan: Plan, proof: Certificate | None) -> int | None:
    usable = plan.memory.usable
    if usable is None or proof is None:
        return usable
    return usable - max(0, needs(proof.memory) - needs(plan.memory))


def _ways(request: Request, number: int) -> Iterator[Request]:
    """Yield the request with `number` of its stated knobs left to the search."""
    data = to_data(request)
    stated = [group for group in LOOSENED if _value(data, group[0]) not in ("auto", None)]
    for groups in combinations(stated, number):
        open_ = {key: 0 if key == "loss_chunk" else "auto" for group in groups for key in group}
        yield change(request, open_)


def _value(data: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data


def _propose(plan: Plan, ways: Sequence[Request], limit: int, *, tight: bool) -> list[Plan]:
    """Return the plan of each within the limit, unless it is `plan`.

    tight: what fits by its typical figures is taken too.
    """
    found: dict[str, Plan] = {}
    for way in ways:
        limits = replace(way.limits, memory=f"{max(limit, 0)} B", tight=tight)
        try:
            problem = problems.read_own_problem(replace(way, limits=limits))
        except InvalidRequest:  # what was stated held two others together
            continue
        made = search.search(problem, levers=False)
        if made.recipe != plan.recipe:
            found.setdefault(made.recipe_digest, made)
    return list(found.values())


def _distance(plan: Plan, made: Plan) -> tuple[bool, float]:
    """What changes the result is further than any slowness."""
    inexact = not set(_changes(plan, made)) <= set(EXACT)
    return inexact, _relative_time(plan, made)


def _relative_time(plan: Plan, made: Plan) -> float:
    problem = problems.read_own_problem(plan.request)
    one, other = (Candidate.of(problem, plan.recipe).seconds for plan in (plan, made))
    return other / one


def _changes(plan: Plan, made: Plan) -> dict[str, Any]:
    layers = problems.read_own_problem(plan.request).model.architecture.layers
    return changed(plan.recipe, made.recipe, layers)


def _name(plan: Plan, made: Plan, proof: Certificate) -> Nearest:
    """With the words that give exactly this recipe when they are set in the request."""
    changes = turned = _changes(plan, made)
    if _recipe_of(plan.request, changes) != made.recipe:  # the search decides the rest otherwise
        layers = problems.read_own_problem(plan.request).model.architecture.layers
        changes = knobs(made.recipe, layers)
    return Nearest(
        changes=changes,
        recipe_digest=proof.recipe_digest,
        memory=proof.memory,
        relative_time=_relative_time(plan, made),
        exact=set(turned) <= set(EXACT),
    )


def _recipe_of(request: Request, changes: Mapping[str, Any]) -> Recipe | None:
    try:
        own = problems.read_own_problem(change(request, changes))
        return search.search(own, levers=False).recipe
    except InvalidRequest:
        return None
