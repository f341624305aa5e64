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
    if recipe.offload != "optimizer":
        return
    settings, found = recipe.optimizer, ("", "")
    if cpu:
        found = "the device is a CPU, whose memory the states are in already", "`offload: none`"
    elif settings.name != "adamw" or settings.implementation != "fused":
        found = (
            f"`{settings.name}` ({settings.implementation}) has no offloaded form",
            ("`optimizer: {name: adamw, implementation: fused}`"),
        )
    elif settings.clip_norm:
        found = (
            f"gradients are on their way to the host before `clip_norm: {settings.clip_norm:g}`"
            " knows their norm", "`optimizer.clip_norm: 0`",
        )  # fmt: skip
    elif recipe.scaled:
        found = "gradients reach the host before they are unscaled", "`precision: bf16-mixed`"
    elif settings.in_backward:
        found = "the host updates after backward", "`optimizer.in_backward: false`"
    elif recipe.parallel.world > 1:
        found = "torchao offloads the states of one device", "one device"
    if found[0]:
        raise InvalidRequest(f"`offload: optimizer` cannot be: {found[0]}", hint=f"use {found[1]}")


def stays(recipe: Recipe, numel: int) -> bool:
    """Whether the state of a weight of so many elements is on the device."""
    return recipe.offload != "optimizer" or numel < KEPT
