"""A recipe with one knob turned: the one list of levers that a plan predicts and a certificate
proves, and the knobs of a recipe as `--set` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.adapters.shared.quantised_base import check_base
from memfit.base_formats import offered_formats
from memfit.core.errors import InvalidRequest
from memfit.families.capabilities.added import can_select
from memfit.families.capabilities.compiled import why_not_compiled
from memfit.families.capabilities.lean import find_lean
from memfit.objectives import find_objective
from memfit.optimizers import default_implementation, find_optimizer, optimizers
from memfit.optimizers.low_bit import can_round
from memfit.optimizers.shared.in_backward import refuse_in_backward
from memfit.optimizers.shared.offloaded import why_not_offloaded
from memfit.parallelism.limits import why_no_mesh
from memfit.plan.request.meshes import divisors
from memfit.plan.request.objectives.sampled import EXPANDABLE
from memfit.plan.request.problem import CHUNKS, Problem, allowed, check, first_recipe
from memfit.plan.simulate.recompute import RecomputedBlocks, state_recompute
from memfit.records.model import Architecture, Model
from memfit.records.recipe import (
    OWN_ATTENTION,
    OWN_AXES,
    Method,
    Offload,
    Precision,
    Recipe,
)

# what is decided alike whichever way the others stand; of these the result does not depend
EXACT = (
    "recompute", "micro_batch", "loss", "loss_chunk", "optimizer.implementation",
    "optimizer.in_backward", "attention", "offload", "lean", "rollout.rows", "allocator",
)  # fmt: skip
UNCHANGED = (
    "micro_batch", "accumulation", "recompute_blocks", "selective_blocks", "loss", "loss_chunk",
    "parallel", "offload", "lean", "rollout",
)  # fmt: skip


class Lever(NamedTuple):
    """One knob turned."""

    changes: dict[str, Any]  # key of the request -> value, as `--set` takes them
    recipe: Recipe


def knobs(recipe: Recipe, layers: int) -> dict[str, Any]:
    """What a recipe decides, by the request's keys; a request with all of them gives this recipe.

    Seeds, lengths and the settings of adapters and optimizers are the request's own.
    """
    found: dict[str, Any] = {
        "method": recipe.method,
        "precision": recipe.precision,
        "recompute": state_recompute(RecomputedBlocks.of(recipe), layers),
        "micro_batch": recipe.micro_batch,
        "loss": recipe.loss,
        "optimizer.name": recipe.optimizer.name,
        "optimizer.implementation": recipe.optimizer.implementation,
        "optimizer.in_backward": recipe.optimizer.in_backward,
        "attention": recipe.attention,
        "lean": list(recipe.lean) or "none",
        "offload": recipe.offload,
    }
    if recipe.parallel.world > 1:
        found |= {f"parallel.{name}": getattr(recipe.parallel, name) for name in OWN_AXES}
    if recipe.method != "full":
        found["base_format"] = recipe.base_format
    if recipe.loss == "chunked":
        found["loss_chunk"] = recipe.loss_chunk
    if recipe.samples:
        found["rollout.rows"] = recipe.rollout.rows or "auto"
        found["allocator"] = recipe.allocator
    if recipe.compares:
        found["preference.reference"] = recipe.preference.reference
    return found


def changed(old: Recipe, new: Recipe, layers: int) -> dict[str, Any]:
    """The knobs of `new` that stand otherwise than in `old`; another method has its own format."""
    before, after = knobs(old, layers), knobs(new, layers)
    if old.method != new.method and not new.coding:
        after.pop("base_format", None)
    return {k: v for k, v in after.items() if before.get(k) != v}


def turn(problem: Problem, recipe: Recipe) -> Iterator[Lever]:
    """Every lever that applies, those that leave what is learned alone first."""
    layers = problem.model.architecture.layers
    for made in (*_exact(problem, recipe, layers), *_inexact(problem, recipe)):
        heap = recipe.allocator if problem.device.is_cpu else made.allocator  # decided last
        other = replace(made, allocator=heap)
        refusals = (
            why_not_offloaded(other, cpu=problem.device.is_cpu),
            why_not_compiled(problem.model, other),
            why_no_mesh(other, problem.model.name, problem.model.architecture),
        )  # fmt: skip
        if not any(refusals):
            yield Lever(changed(recipe, other, layers), other)


def _exact(problem: Problem, recipe: Recipe, layers: int) -> Iterator[Recipe]:
    batch, own = recipe.micro_batch * recipe.accumulation, recipe.optimizer  # of one rank
    architecture = problem.model.architecture
    own_way = RecomputedBlocks.of(recipe)
    ways = (
        RecomputedBlocks(0, 0),
        RecomputedBlocks(0, layers),
        RecomputedBlocks(layers // 2, 0),
        RecomputedBlocks(layers, 0),
    )
    for recompute in dict.fromkeys(ways):
        if recompute != own_way and (can_select(architecture, recipe) or not recompute.selective):
            yield replace(recipe, **recompute.knobs)
    for place in _places(problem, recipe, layers):
        yield replace(recipe, offload=place)
    yield from _rollouts(problem, recipe)
    for micro in _micro_batches(recipe):
        yield replace(recipe, micro_batch=micro, accumulation=batch // micro)
    if recipe.loss == "chunked":
        yield replace(recipe, loss="plain", loss_chunk=0)
    elif not head_extra(find_adapter(recipe).adapt(problem.model, recipe)):
        yield replace(recipe, loss="chunked", loss_chunk=CHUNKS[0])
    if recipe.references:
        yield replace(recipe, preference=replace(recipe.preference, reference="precomputed"))
    for implementation in _implementations(problem, recipe):
        yield replace(recipe, optimizer=replace(own, implementation=implementation))
    if not refuse_in_backward(
        clip_norm=own.clip_norm, accumulation=recipe.accumulation, scaled=recipe.scaled
    ):
        yield replace(recipe, optimizer=replace(own, in_backward=not own.in_backward))
    yield from _other_lean(architecture, recipe)
    for kernel in OWN_ATTENTION:
        if kernel != recipe.attention and _possible(problem, recipe, kernel):
            yield replace(recipe, attention=kernel)


def _rollouts(problem: Problem, recipe: Recipe) -> Iterator[Recipe]:
    """Fewer answers in flight, which take more waves, or more; and segments that expand."""
    if not recipe.samples:
        return
    rollout, answers = recipe.rollout, recipe.own_rows
    rows = rollout.in_flight(answers)
    for other in dict.fromkeys((-(-rows // 2), min(2 * rows, answers))):
        if other != rows:
            yield replace(recipe, rollout=replace(rollout, rows=other if other < answers else 0))
    if not recipe.allocator and not problem.device.is_cpu:
        yield replace(recipe, allocator=EXPANDABLE)


def _micro_batches(recipe: Recipe) -> tuple[int, ...]:
    """The next smaller and the next larger one that learn the same."""
    if recipe.optimizer.in_backward or recipe.mismatches:
        return ()  # the one takes the whole batch; the other's micro-batch is learned with
    parts = divisors(recipe.micro_batch * recipe.accumulation)
    whole = [d for d in parts if not d % find_objective(recipe.objective).least_rows]  # of pairs
    smaller = [d for d in whole if d < recipe.micro_batch][-1:]
    return *smaller, *[d for d in whole if d > recipe.micro_batch][:1]


def _places(problem: Problem, recipe: Recipe, layers: int) -> tuple[Offload, ...]:
    """What else could wait in the host's memory; a CPU's own is that."""
    if recipe.offload != "none":
        return ("none",)
    if problem.device.is_cpu or recipe.parallel.world > 1:
        return ()
    activations: tuple[Offload, ...] = ("activations",) if layers > 1 else ()
    return activations if recipe.samples else (*activations, "optimizer")


def _other_lean(a: Architecture, recipe: Recipe) -> Iterator[Recipe]:
    """Without lean blocks, or with them where nothing else keeps less already."""
    own = () if recipe.selective_blocks or recipe.precision == "fp8-mixed" else find_lean(a)
    if own or recipe.lean:
        yield replace(recipe, lean=() if recipe.lean else own)


def _implementations(problem: Problem, recipe: Recipe) -> Iterator[Any]:
    """The other ones of the same optimizer that the device and the mesh can have."""
    own = recipe.optimizer
    for name in optimizers.find(own.name).implementations:
        other = replace(recipe, optimizer=replace(own, implementation=name))
        if name != own.implementation and _runs(problem, other):
            yield name


def _runs(problem: Problem, recipe: Recipe) -> bool:
    """Whether the optimizer has this implementation, on this device and mesh."""
    family, name = optimizers.find(recipe.optimizer.name), recipe.optimizer.implementation
    if problem.device.is_cpu and name in family.cuda_only:
        return False
    if recipe.parallel.world > 1 and name in family.unsharded_only:
        return False
    return name in family.implementations


def _possible(problem: Problem, recipe: Recipe, kernel: str) -> bool:
    """Whether the device and the precision have this kernel."""
    request = replace(problem.request, attention=kernel, precision=recipe.precision)
    try:
        check(replace(problem, request=request))
    except InvalidRequest:
        return False
    return True


def head_extra(model: Model) -> str:
    """The name of a head's bias, or of an adapter's weight in it, or of a score head, or "".

    A chunked loss goes with neither.
    """
    head = [w.name for w in model.weights if w.part == "head"]
    if model.architecture.scores:
        return head[0]
    return next((name for name in head if "lora_" in name or name.endswith(".bias")), "")


def _quantised(problem: Problem, recipe: Recipe) -> Iterator[Recipe]:
    """Adapters over a base in 8 or 4 bits, where the model can have one."""
    if recipe.method not in ("full", "lora") or recipe.weights != "pretrained":
        return
    for base in offered_formats():
        request = replace(problem.request, method="lora", base_format=base, offload="none")
        changed = replace(problem, request=request)
        try:
            check_base(problem.model, base, "lora")
            other = first_recipe(changed, method="lora", precision=recipe.precision)
        except InvalidRequest:
            continue
        if base != recipe.base_format:
            unchanged = {k: getattr(recipe, k) for k in UNCHANGED}
            # a quantised base has no products that could be selected
            unchanged["recompute_blocks"] += unchanged.pop("selective_blocks")
            yield replace(other, **unchanged)


def _inexact(problem: Problem, recipe: Recipe) -> Iterator[Recipe]:
    """The same exact knobs under another precision, method or optimizer."""
    pairs: list[tuple[Method, Precision]] = []
    if recipe.precision != "bf16" and not (recipe.method == "full" and recipe.precision == "fp32"):
        pairs.append((recipe.method, "bf16"))
    if recipe.precision == "fp32":
        pairs.append((recipe.method, "bf16-mixed"))
    if recipe.method == "full" and recipe.weights == "pretrained":
        pairs.append(("lora", recipe.precision))
    # whether the whole mesh can offload is asked of what comes out
    alone = replace(problem, request=replace(problem.request, offload="none"))
    for method, precision in pairs:
        if allowed(problem, precision):
            other = first_recipe(alone, method=method, precision=precision)
            yield replace(other, **{k: getattr(recipe, k) for k in UNCHANGED})
    yield from _quantised(problem, recipe)
    if smaller := find_optimizer(recipe.optimizer).low_bit_form:
        implementation = default_implementation(smaller, cuda=not problem.device.is_cpu)
        yield _with_optimizer(problem, recipe, name=smaller, implementation=implementation)
    if recipe.optimizer.name != "sgd":
        other = _with_optimizer(problem, recipe, name="sgd")
        if not _runs(problem, other):
            possible = next(_implementations(problem, other))
            other = replace(other, optimizer=replace(other.optimizer, implementation=possible))
        yield other


def _with_optimizer(problem: Problem, recipe: Recipe, *, name: str, **settings: Any) -> Recipe:
    """Another optimizer, which rounds by chance where the request leaves that open and it can."""
    rounding = problem.request.optimizer.stochastic_rounding
    rounds = recipe.precision == "bf16" and can_round(name) and rounding is not False
    optimizer = replace(recipe.optimizer, name=name, stochastic_rounding=rounds, **settings)
    return replace(recipe, optimizer=optimizer)
