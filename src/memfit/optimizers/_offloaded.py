"""When the optimizer's states can be on the host, and which of them stay on the device.

torchao's CPUOffloadOptimizer (torchao/optim/cpu_offload.py) copies each gradient to the host when
backward has it, updates there with torch's fused AdamW, and copies the weights back.
"""

from __future__ import annotations

from memfit.errors import InvalidRequest
from memfit.recipe import Recipe

KEPT = 4096  # elements; smaller weights are updated on the device
COPIES = 4  # on the host, pinned: weights, gradients and both moments


def check_offload(recipe: Recipe, *, cpu: bool) -> None:
    """Raise InvalidRequest when the recipe offloads its optimizer and cannot; cpu: the device."""
    if found := offload_lack(recipe, cpu=cpu):
        because, instead = found
        raise InvalidRequest(f"`offload: optimizer` cannot be: {because}", hint=f"use {instead}")


def offload_lack(recipe: Recipe, *, cpu: bool) -> tuple[str, str] | None:
    """Why the recipe cannot offload its optimizer as it says, and what to use; None: it can."""
    settings = recipe.optimizer
    if recipe.offload != "optimizer":
        return None
    if cpu:
        return "the device is a CPU, whose memory the states are in already", "`offload: none`"
    if settings.name != "adamw" or settings.implementation != "fused":
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


def stays(recipe: Recipe, numel: int) -> bool:
    """Whether the state of a weight of so many elements is on the device."""
    return recipe.offload != "optimizer" or numel < KEPT
