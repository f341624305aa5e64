"""What no rank of many can run, for plan and trainer alike."""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.optimizers import find_optimizer
from memfit.parallelism.context import why_no_shared_rows
from memfit.parallelism.experts import why_no_dealt_experts
from memfit.parallelism.pipeline import why_no_pipeline
from memfit.parallelism.tensor import why_no_shared_products
from memfit.records.model import Architecture
from memfit.records.recipe import Recipe

Unsupported = tuple[str, str]  # why not, and what to use instead


def why_no_mesh(recipe: Recipe, name: str, architecture: Architecture) -> Unsupported | None:
    """Why ranks cannot share a recipe's work as its mesh says, and what to use; None where they
    can."""
    arguments = recipe, name, architecture
    return (
        why_no_pipeline(*arguments)
        or why_no_shared_products(*arguments)
        or why_no_shared_rows(*arguments)
        or why_no_dealt_experts(*arguments)
    )


def refuse(unsupported: Unsupported | None) -> None:
    """Raise InvalidRequest unless `unsupported` is None."""
    if unsupported is not None:
        raise InvalidRequest(unsupported[0], hint=unsupported[1])


def check_ranks(recipe: Recipe) -> None:
    """Raise InvalidRequest for what the ranks of a recipe cannot do together."""
    ranks, optimizer = recipe.parallel.world, recipe.optimizer
    model = read_model(recipe.model)
    arguments = recipe, model.name, model.architecture
    refuse(why_no_pipeline(*arguments) or why_no_dealt_experts(*arguments))
    if ranks == 1:
        return
    family = find_optimizer(optimizer)
    if optimizer.implementation in family.unsharded_only:
        can = [i for i in family.implementations if i not in family.unsharded_only]
        other = f"implementation: {can[0]}" if can else "name: adamw"
        raise InvalidRequest(
            f"`{optimizer.implementation}` {optimizer.name} cannot update the shards of {ranks}"
            f" ranks: {family.unsharded_reason}",
            hint=f"use `optimizer.{other}`",
        )
    if family.gathers and optimizer.in_backward:
        raise InvalidRequest(
            f"updates within backward of {optimizer.name} would gather whole matrices there, which"
            f" {ranks} ranks are not proven to do in one order",
            hint="use `optimizer.in_backward: false`",
        )
    if recipe.scaled:
        raise InvalidRequest(
            f"`precision: {recipe.precision}` skips steps that overflow, and {ranks} ranks do not"
            " agree on which",
            hint="use `precision: bf16-mixed`",
        )
    refuse(why_no_shared_products(*arguments) or why_no_shared_rows(*arguments))


def check_method(method: str, precision: str, ranks: int) -> None:
    """Raise InvalidRequest for a method that only one device has in this precision."""
    if method == "dora" and ranks > 1 and precision != "fp32":
        stated = "" if precision == "auto" else f" with `precision: {precision}`"
        raise InvalidRequest(
            f"`method: dora` on {ranks} ranks{stated}: FSDP2 gathers the magnitudes in bf16, where"
            " a change of less than 0.4 % is lost",
            hint="use `precision: fp32`, `method: lora`, or one device",
        )
