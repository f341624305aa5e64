"""Time of the optimizer's update: the bytes it moves, its products, and the host's launches.

`clock/` has seconds of AdamW's update, from published runs; another optimizer's are as many times
longer as it moves more bytes (`OptimizerFamily.moved`), and its products take what products take.
"""

from __future__ import annotations

from msgspec.structs import replace

from memfit.catalog import find_device
from memfit.optimizers import find_optimizer
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.rates import Machine
from memfit.plan.step_time.work import Layout
from memfit.records.model import Model, TensorSpec
from memfit.records.recipe import Optimizer, Recipe

# Seconds that the host takes for an optimizer's step over one weight alone: torch 2.13's fused
# AdamW, 300 weights one by one, on a core of a busy x86 server. Not measured beside a GPU.
ALONE = 2e-4

Updated = tuple[tuple[TensorSpec, int], ...]  # trained tensors that are alike, and how many


def count_updated(model: Model) -> Updated:
    """The trained tensors of a model after its adapter."""
    counts: dict[TensorSpec, int] = {}
    for w in model.weights:
        if w.trainable:
            counts[w.spec] = counts.get(w.spec, 0) + 1
    return tuple(counts.items())


def moved(updated: Updated, settings: Optimizer) -> float:
    """Bytes read and written by one update of all of them."""
    family = find_optimizer(settings)
    return sum(count * family.moved(spec, settings) for spec, count in updated)


def flop(updated: Updated, settings: Optimizer) -> float:
    """FLOP of the matrix products of one update of all of them."""
    family = find_optimizer(settings)
    return sum(count * family.flop(spec, settings) for spec, count in updated)


def with_update(
    layout: Layout, updated: Updated, recipe: Recipe, layers: int, machine: Machine
) -> Layout:
    """The layout of a step whose update is that of the recipe's optimizer, where it says.

    On the host, the update's bytes pass its memory (the catalogue's `cpu-x86`), not the device's.
    """
    settings = recipe.optimizer
    if recipe.offload == "optimizer":
        memory = find_device("cpu-x86").bandwidth or machine.host
        there = layout.update.state_bytes * machine.host / memory
        return change(layout, state_bytes=0.0, offloaded=layout.update.offloaded + there)
    plain = replace(settings, name="adamw", implementation="fused")
    known = moved(updated, plain)
    if not known:
        return layout
    found = change(layout, state_bytes=layout.update.state_bytes * moved(updated, settings) / known)
    if products := flop(updated, settings):
        found = change(found, update_flop=products)
    if settings.in_backward:
        weights = sum(count for _, count in updated)
        found = change(found, update_launch=ALONE * weights / layers)
    return found
