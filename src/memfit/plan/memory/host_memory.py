"""What waits in host memory while devices train: in no verdict of the device's memory.

What `offload` keeps there is held to `limits.host_memory`, where the request has one.
"""

from __future__ import annotations

from memfit.core.errors import DoesNotFit
from memfit.core.units import parse_bytes, show_bytes, show_gib
from memfit.optimizers import find_optimizer
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import scores_old
from memfit.records.request import Limits

# bytes of host tensors for a token of an update's rows: ids and labels in int64, a mask in fp32
ROW, LOG_PROB = 8 + 8 + 4, 4  # and what one forward without a gradient leaves
OF_VALUES = 4  # as many again: values, their returns and places, and each token's advantage
# bytes of an answer's token as CPython 3.11 to 3.14 hold it until the rollout's rewards are known:
# an int and a float with a pointer each, and its text; a random number of fp64 while it is sampled
ANSWER, DRAWN = (32 + 8) + (24 + 8) + 8, 8


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


def find_host_excess(recipe: Recipe, nbytes: int, limits: Limits) -> DoesNotFit | None:
    """The error of a recipe that offloads more than each machine may hold; nbytes: of all."""
    each = nbytes // _count_machines(recipe)
    if limits.host_bytes is None or each <= limits.host_bytes:
        return None
    return DoesNotFit(
        f"`offload: {recipe.offload}` keeps {show_gib(each)} in the memory of each host, and"
        f" `limits.host_memory` is {limits.host_memory}",
        hint="raise it, or use another `offload`, a quantised base or a larger device",
    )


def _count_machines(recipe: Recipe) -> int:
    world = recipe.parallel.world
    return -(-world // (recipe.devices_per_node or world))


def describe_host(recipe: Recipe, nbytes: int, limits: Limits) -> tuple[str, ...]:
    """What each machine's host holds, in words; nbytes: of all machines."""
    if not nbytes:
        return ()
    machines = _count_machines(recipe)
    what = {"optimizer": "states", "activations": "activations"}.get(
        recipe.offload, "weights, gradients and states"
    )
    each = "the host" if machines == 1 else f"each of {machines} hosts"
    judged = "which no verdict counts"
    if limits.host_memory:
        judged = f"within `limits.host_memory: {limits.host_memory}`"
    return (f"{each} has {show_gib(nbytes // machines)} to spare for {what}, {judged}",)


def rollouts_on_host(recipe: Recipe) -> dict[str, int]:
    """Bytes of host memory that an iteration of reinforcement learning takes, by what takes them.

    At the bounds of lengths, all rounds of dynamic sampling; `reward_processes` is their
    limit, `reward.memory` of each. Of many ranks each knows the answers of all, and has its own
    rows and processes. Prompts of the data, which are read once, are not counted.
    """
    if not recipe.samples:
        return {}
    rollout, policy, answers = recipe.rollout, recipe.policy, recipe.global_batch
    passes = int(scores_old(recipe.objective, policy)) + int(policy.beta > 0)
    passes += OF_VALUES if recipe.values else 0
    tokens = answers * rollout.max_completion_length * (1 + rollout.dynamic_sampling)
    drawn = rollout.in_flight(recipe.own_rows) * rollout.max_completion_length
    return {
        "rows": recipe.own_rows * rollout.width * (ROW + LOG_PROB * passes),
        "answers": ANSWER * tokens + DRAWN * drawn,
        "reward_processes": len(recipe.reward.functions) * parse_bytes(recipe.reward.memory),
    }


def describe_rollouts(recipe: Recipe) -> tuple[str, ...]:
    """What a rollout holds on the host, in words; nothing of what samples none."""
    held = rollouts_on_host(recipe)
    if not held:
        return ()
    own, processes = show_bytes(held["rows"] + held["answers"]), ""
    if recipe.reward.functions:
        processes = f", and at most {recipe.reward.memory} for each reward process"
        processes += " (`reward.memory`)"
    return (f"{own} of host memory for a rollout{processes}: in no verdict",)
