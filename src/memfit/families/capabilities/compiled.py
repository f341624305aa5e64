"""Where blocks can be compiled (`compile: blocks`): for plan and trainer."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.base_formats import find_base_format
from memfit.core.errors import InvalidRequest
from memfit.families import find_family
from memfit.families.capabilities.lean import find_lean
from memfit.records.model import Architecture, Model
from memfit.records.recipe import Lean, Recipe
from memfit.records.request import RecomputeBlocks, Request

KEY = "`compile: blocks`"
LEAVE = "use `compile: none`"
DECIDES = "the compiler decides what a block keeps and what it makes again"


def settle_compiled(request: Request) -> Request:
    """The request with nothing left on `auto` that compiled blocks cannot have.

    Raises InvalidRequest where it asks for such a thing.
    """
    if request.compile != "blocks":
        return request
    recompute, optimizer = request.recompute, request.optimizer
    conflicts = {
        f"recompute: {recompute}": recompute not in ("auto", "none", RecomputeBlocks()),
        f"lean: {request.lean}": request.lean not in ("auto", "none", ()),
        f"offload: {request.offload}": request.offload == "activations",
    }
    for name, applies in conflicts.items():
        if applies:
            raise InvalidRequest(f"{KEY} does not go with `{name}`: {DECIDES}", hint=LEAVE)
    return replace(
        request,
        recompute="none", lean="none",
        offload="none" if request.offload == "auto" else request.offload,
        optimizer=replace(optimizer, in_backward=optimizer.in_backward is True),
    )  # fmt: skip


def keep_as_lean(a: Architecture, recipe: Recipe) -> tuple[Lean, ...]:
    """The lean operations of a recipe's blocks; of compiled blocks, those that keep as much."""
    return find_lean(a) if recipe.compile == "blocks" else recipe.lean


def compiled_bounds(recipe: Recipe) -> tuple[str, ...]:
    """What a reader must know of the certificate of compiled blocks."""
    if recipe.compile != "blocks":
        return ()
    return (
        "compiled blocks: what they keep is exact; within a block the graph's operators are run one"
        " by one, a bound from above on what fused kernels hold",
    )


def check_compiled(model: Model, recipe: Recipe) -> None:
    """Raise InvalidRequest where a recipe's blocks cannot be compiled."""
    if reason := why_not_compiled(model, recipe):
        raise InvalidRequest(f"{KEY} does not go with {reason}", hint=LEAVE)


def why_not_compiled(model: Model, recipe: Recipe) -> str:
    """What of a recipe leaves no block to compile as a whole; "" where nothing does."""
    if recipe.compile != "blocks":
        return ""
    recomputed = recipe.recompute_blocks + recipe.selective_blocks
    base = find_base_format(recipe.base_format)
    base_refuses = bool(recipe.coding and base.why_not_compiled)
    reasons = {
        f"the blocks of `{model.name}` (`{model.architecture.family}`), which have not been"
        " compiled as a whole": not find_family(model.architecture.family).compiles,
        f"{recomputed} recomputed blocks: {DECIDES}": recomputed > 0,
        f"`lean: {', '.join(recipe.lean)}`: {DECIDES}": bool(recipe.lean),
        f"`offload: activations`: {DECIDES}": recipe.offload == "activations",
        f"`base_format: {base.name}`, whose products {base.why_not_compiled}": base_refuses,
        "`attention: math`: its scores come into the compiled graph, and how many of them fused"
        " kernels hold is not described": recipe.attention == "math",
        f"`precision: {recipe.precision}`, whose casts are other kernels when they are"
        " compiled": recipe.precision == "fp8-mixed",
        f"`qat: {recipe.qat}`, whose rounding must stay what it is evaluated with": bool(
            recipe.qat
        ),
        "`task.packing: true`: documents of other lengths would be compiled anew in every"
        " batch": recipe.packing,
        f"`objective: {recipe.objective}`: its rows are compared, and its reference runs the same"
        " blocks in another way": recipe.compares,
        "dropout of the adapter: the compiler draws its own random numbers": (
            recipe.lora.dropout > 0
        ),
        "`optimizer.in_backward`: a compiled backward gives all of a block's gradients at"
        " once": recipe.optimizer.in_backward,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
