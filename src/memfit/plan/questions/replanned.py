"""The levers of a plan: the request replanned with one knob set, as the user would type it.

What a knob frees the new plan spends on something faster, so that a lever promises what doing it
gives, and no more. Shown are the knobs that a user decides; those of one process alone (another
implementation, what waits on the host) are in `memfit certify --why` and `--why-not`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memfit.base_formats import is_quantised, offered_formats
from memfit.core import units
from memfit.core.errors import Error
from memfit.objectives import find_objective
from memfit.optimizers import find_optimizer
from memfit.plan.frameworks import Framework
from memfit.plan.request.meshes import describe_mesh, divisors
from memfit.plan.request.problem import Problem
from memfit.plan.search.choice import Choice, Found
from memfit.plan.search.levers import head_extra
from memfit.records.hardware import Device
from memfit.records.recipe import Recipe
from memfit.records.request import Request, change, find_weights
from memfit.records.results import Considered, Plan

INEXACT = "changes what is learned"  # of a lever, among its reasons
Planner = Callable[[Request], Found]


def replan_levers(problem: Problem, chosen: Choice, find_plan: Planner) -> tuple[Considered, ...]:
    """Each lever's row: what its own plan takes, beside the chosen one.

    find_plan: of a request on the same device, with its choice. Raises nothing: a knob that cannot
    be set is left out, and so is one that changes nothing.
    """
    rows: list[Considered] = []
    seen = [chosen.recipe]
    for changes in list_changes(problem, chosen):
        try:
            changed = change(problem.request, changes)
            plan, other = find_plan(changed)
        except Error:
            continue
        if other.recipe in seen:
            continue
        seen.append(other.recipe)
        rows.append(describe_lever(plan, other, chosen, changes, problem.device))
    return tuple(rows)


def list_changes(problem: Problem, chosen: Choice) -> Iterator[dict[str, Any]]:
    """The keys to set, one knob at a time; what changes the result first.

    Of values that the framework's step does not have none is listed.
    """
    for changes in _list_knobs(problem, chosen):
        if all(_has(problem.framework, key, value) for key, value in changes.items()):
            yield changes


def _has(framework: Framework, key: str, value: Any) -> bool:
    """Whether a step has this value of a knob."""
    known = framework.values.get(key.removeprefix("optimizer.").replace("name", "optimizer"))
    return known is None or value in known


def _list_knobs(problem: Problem, chosen: Choice) -> Iterator[dict[str, Any]]:
    recipe = chosen.recipe
    yield from _inexact(problem, recipe)
    yield {"recompute": "none" if recipe.recompute_blocks or recipe.selective_blocks else "full"}
    own = recipe.micro_batch * recipe.accumulation
    whole = [d for d in divisors(own) if not d % find_objective(recipe.objective).least_rows]
    if recipe.mismatches:  # whose micro-batch is learned with
        whole = []
    for micro in [d for d in whole if d > recipe.micro_batch][:1]:
        yield {"micro_batch": micro}
    yield from _rollouts(problem, recipe)
    if recipe.loss == "chunked":
        yield {"loss": "plain"}
    elif not head_extra(chosen.model):
        yield {"loss": "chunked"}


def _rollouts(problem: Problem, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Of sampled answers: half as many in flight, longer ones, more of them to each prompt."""
    if not recipe.samples:
        return
    rollout, batch = recipe.rollout, recipe.global_batch
    rows = rollout.in_flight(recipe.own_rows)
    if rows > 1:
        yield {"rollout.rows": -(-rows // 2)}
    if problem.request.task.sequence_length == "auto":
        yield {"rollout.max_completion_length": 2 * rollout.max_completion_length}
    twice = {"rollout.num_generations": 2 * rollout.num_generations}
    yield {**twice, "task.global_batch": 2 * batch}


def _inexact(problem: Problem, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Another method, base, precision or optimizer."""
    request = problem.request
    lora = {} if recipe.method == "lora" else {"method": "lora"}
    weights = find_weights(request, problem.reference)
    if weights == "pretrained" and recipe.method in ("full", "lora"):
        if lora:
            yield {**lora}
        if not is_quantised(recipe.base_format):
            yield {**lora, "base_format": offered_formats()[-1]}
    if recipe.precision != "bf16-mixed" and not problem.device.is_cpu:
        yield {"precision": "bf16-mixed"}
    if recipe.precision != "bf16" or recipe.optimizer.stochastic_rounding:
        pure = {"optimizer.name": "adamw"} if request.optimizer.name != "auto" else {}
        yield {"precision": "bf16", **pure}
    smaller = find_optimizer(recipe.optimizer).low_bit_form
    if smaller and not recipe.adapted:
        yield {"optimizer.name": smaller}


def describe_lever(
    plan: Plan, other: Choice, chosen: Choice, changes: dict[str, Any], device: Device
) -> Considered:
    """The row of a lever whose own plan this is."""
    memory = plan.memory
    assert memory.peak_allocated is not None  # what was searched has bytes
    ratio = other.seconds(device) / chosen.seconds(device)
    mesh, same = other.recipe.parallel, chosen.recipe.parallel
    return Considered(
        label=plan.label,
        changes=changes,
        peak_allocated=memory.peak_allocated,
        device_total=memory.device_total,
        exact=True,
        relative_time=ratio,
        fits=memory.verdict == "fits" or memory.usable is None,
        chosen=False,
        because=_reason(plan, ratio, other.recipe, chosen.recipe),
        mesh="" if mesh == same else describe_mesh(mesh),
    )


def _reason(plan: Plan, ratio: float, mine: Recipe, its: Recipe) -> str:
    """What doing it gives, in words."""
    memory, notes = plan.memory, []
    if memory.verdict == "does_not_fit" and memory.needed is not None and memory.usable is not None:
        notes.append(f"needs {units.show_bytes(memory.needed - memory.usable)} more than there is")
    elif memory.verdict == "at_risk":
        notes.append("may not fit")
    elif ratio > 1:
        notes.append(f"fits, {ratio - 1:.1%} slower")
    else:
        notes.append(f"fits, {1 - ratio:.1%} faster" if ratio < 1 else "fits, equally fast")
    if mine.method != its.method:
        notes.append(f"becomes {mine.method}")
    if learns(mine) != learns(its):
        notes.append(INEXACT)
    return "; ".join(notes)


def learns(recipe: Recipe) -> tuple[object, ...]:
    """The knobs on which the result of training depends."""
    own = recipe.optimizer
    stored = recipe.precision, own.name, own.stochastic_rounding
    answers = (recipe.rollout.num_generations, recipe.rollout.width) if recipe.samples else ()
    return recipe.method, recipe.coding, *stored, *answers
