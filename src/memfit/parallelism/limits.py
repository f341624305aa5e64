"""What no rank of many can run, for plan and trainer alike."""

from __future__ import annotations

from memfit.errors import InvalidRequest
from memfit.families import read_model
from memfit.optimizers import find_optimizer
from memfit.parallelism.context import check_context
from memfit.parallelism.pipeline import check_pipeline
from memfit.parallelism.tensor import check_tensor
from memfit.recipe import Recipe


def check_ranks(recipe: Recipe) -> None:
    """Raise InvalidRequest for what the ranks of a recipe cannot do together."""
    ranks, optimizer = recipe.parallel.world, recipe.optimizer
    model = read_model(recipe.model)
    check_pipeline(recipe, model.name, model.architecture)
    if ranks == 1:
        return
    family = find_optimizer(optimizer)
    if optimizer.implementation in family.unsharded_only:
        can = [i for i in family.implementations if i not in family.unsharded_only]
        other = f"implementation: {can[0]}" if can else "name: adamw"
        raise InvalidRequest(
            f"`{optimizer.implementation}` {optimizer.name} cannot update the shards of {ranks}"
            f" ranks: {family.unsharded_because}",
            hint=f"use `optimizer.{other}`",
        )
    if recipe.scaled:
        raise InvalidRequest(
            f"`precision: {recipe.precision}` skips steps that overflow, and {ranks} ranks do not"
            " agree on which",
            hint="use `precision: bf16-mixed`",
        )
    check_tensor(recipe, model.name, model.architecture)
    check_context(recipe, model.name, model.architecture)


def check_method(method: str, ranks: int) -> None:
    """Raise InvalidRequest for a method that only one device has."""
    if method == "dora" and ranks > 1:
        raise InvalidRequest(
            f"`method: dora` on {ranks} ranks: FSDP2 gathers the magnitudes in bf16, where a change"
            " of less than 0.4 % is lost",
            hint="use `method: lora`, or one device",
        )
