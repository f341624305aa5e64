"""What waits in host memory while devices train; it is shown, and compared with no limit."""

from __future__ import annotations

from memfit.core.units import show_gib
from memfit.optimizers import find_optimizer
from memfit.records.model import Model
from memfit.records.recipe import Recipe


def shards_on_host(recipe: Recipe, model: Model) -> int:
    """Bytes on all hosts of `offload: optimizer` or `parameters`; model: as its method stores it.

    States alone, or with the shards of weights and of what is trained the gradients.
    """
    if recipe.offload not in ("optimizer", "parameters"):
        return 0
    family, settings = find_optimizer(recipe.optimizer), recipe.optimizer
    trained = [w for w in model.weights if w.trainable]
    states = sum(s.nbytes for w in trained for s in family.state(w.spec, settings))
    if recipe.offload == "optimizer":
        return states
    return states + sum(w.nbytes for w in (*model.weights, *trained))


def describe_host(recipe: Recipe, nbytes: int) -> tuple[str, ...]:
    """What each machine's host holds, in words; nbytes: of all machines."""
    if not nbytes:
        return ()
    world = recipe.parallel.world
    machines = -(-world // (recipe.devices_per_node or world))
    what = "states" if recipe.offload == "optimizer" else "weights, gradients and states"
    each = "the host" if machines == 1 else f"each of {machines} hosts"
    return (
        f"{each} has {show_gib(nbytes // machines)} to spare for {what}, which no verdict counts",
    )
