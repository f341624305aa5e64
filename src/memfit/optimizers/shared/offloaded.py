"""When the optimizer's states, or with them a rank's weights, can be on the host, and which states
stay on the device.

Of one device torchao's CPUOffloadOptimizer (torchao/optim/cpu_offload.py) copies each gradient to
the host when backward has it, updates there with torch's fused AdamW, and copies the weights back.
Of many ranks FSDP2's CPUOffloadPolicy keeps the shards of weights, gradients and states there.
"""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.optimizers import find_optimizer, optimizers, optimizers_that
from memfit.records.model import Model
from memfit.records.recipe import Recipe

SMALLEST = 4096  # elements; smaller weights are updated on the device
COPIES = 4  # on the host, pinned: weights, gradients and both moments


def check_offload(recipe: Recipe, *, cpu: bool) -> None:
    """Raise InvalidRequest where the recipe cannot offload as it states; cpu: the device is one."""
    if found := why_not_offloaded(recipe, cpu=cpu):
        reason, instead = found
        raise InvalidRequest(
            f"`offload: {recipe.offload}` cannot be: {reason}", hint=f"use {instead}"
        )


def why_not_offloaded(recipe: Recipe, *, cpu: bool) -> tuple[str, str] | None:
    """Return why the recipe cannot offload its updates, and what to use; None: it can."""
    settings = recipe.optimizer
    if recipe.offload not in ("optimizer", "parameters"):
        return None
    if cpu:
        return "the device is a CPU, whose memory the states are in already", "`offload: none`"
    if recipe.offload == "parameters":
        return _why_not_for_shards(recipe)
    if settings.implementation not in optimizers.find(settings.name).offloaded:
        return (
            f"`{settings.name}` ({settings.implementation}) has no offloaded form",
            "`optimizer: {name: adamw, implementation: fused}`",
        )
    if settings.clip_norm:
        return (
            f"gradients are on their way to the host before `clip_norm: {settings.clip_norm:g}`"
            " knows their norm", "`optimizer.clip_norm: 0`",
        )  # fmt: skip
    if recipe.scaled:
        return "gradients reach the host before they are unscaled", "`precision: bf16-mixed`"
    if settings.in_backward:
        return "the host updates after backward", "`optimizer.in_backward: false`"
    if recipe.parallel.world > 1:
        return "torchao offloads the states of one device", "one device"
    return None


def _why_not_for_shards(recipe: Recipe) -> tuple[str, str] | None:
    """Of weights that wait on the host."""
    settings, shards = recipe.optimizer, recipe.parallel.shards
    if shards == 1:
        return (
            "what waits on the host are FSDP2's shards, and `parallel.dp_shard: 1` makes none",
            "`offload: optimizer` or `offload: activations`" if recipe.parallel.world == 1
            else "`parallel.dp_shard: 2` or more",
        )  # fmt: skip
    if settings.in_backward:
        return "the host updates after backward", "`optimizer.in_backward: false`"
    if not find_optimizer(settings).updates_on_host:
        known = optimizers_that("updates_on_host")
        others = " or ".join(f"`optimizer.name: {name}`" for name in known)
        return f"`{settings.name}` is not proven on the host's shards", others
    return None


def host_bytes(model: Model, recipe: Recipe) -> int:
    """What a rank's shards take in the host's memory under `offload: parameters`: weights, and of
    the trained ones gradients and states; model: as the rank holds it.
    """
    trained = [w.spec for w in model.weights if w.trainable]
    state = find_optimizer(recipe.optimizer).state
    held = sum(spec.nbytes for w in model.weights for spec in w.stored.values())
    held += sum(spec.nbytes for spec in trained)
    return held + sum(s.nbytes for spec in trained for s in state(spec, recipe.optimizer))


def stays(recipe: Recipe, numel: int) -> bool:
    """Return whether the state of a weight of `numel` elements is on the device."""
    if recipe.offload == "parameters":
        return False
    return recipe.offload != "optimizer" or numel < SMALLEST
