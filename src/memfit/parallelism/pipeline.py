"""Blocks that `pp` ranks hold one after the other (Huang et al. 1811.06965): which stage holds
what, where that can be, and in what order a stage runs its micro-batches.

Sending, receiving and the schedules are torch's (`torch.distributed.pipelining`): 1F1B (Narayanan
et al. 1806.03377), and the interleaved one (2104.04473) where a rank holds several pieces. Stage k
of n holds the blocks from layers * k // n on: where blocks do not divide, later stages hold one
more, as earlier ones hold more micro-batches. The embedding is the first one's, the final norm and
the head are the last one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from msgspec.structs import replace

from memfit.families import families_that, find_family
from memfit.optimizers import find_optimizer, optimizers_that
from memfit.parallelism.tensor import OTHERWISE
from memfit.records.model import Architecture, Model, Weight
from memfit.records.recipe import Parallel, Recipe


def blocks_of(layers: int, stages: int, stage: int) -> range:
    """The blocks of a stage."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def stages_of(parallel: Parallel, rank: int) -> list[int]:
    """The stages of a rank, of pp * virtual_pp: every pp-th from its place on."""
    return list(range(parallel.stage_place(rank), parallel.stages, parallel.pp))


def owner_of(weight: Weight, layers: int, parallel: Parallel) -> int:
    """The place along pp of the ranks that hold a weight."""
    if weight.layer >= 0:
        stages = range(parallel.stages)
        found = next(s for s in stages if weight.layer in blocks_of(layers, parallel.stages, s))
        return found % parallel.pp
    return 0 if weight.part == "embedding" else parallel.pp - 1


@lru_cache(maxsize=64)
def stage_model(model: Model, parallel: Parallel, rank: int) -> Model:
    """The model with the weights of this rank's stages alone."""
    if parallel.pp == 1:
        return model
    layers, place = model.architecture.layers, parallel.stage_place(rank)
    own = (w for w in model.weights if owner_of(w, layers, parallel) == place)
    return replace(model, weights=tuple(own))


def shown_micro_batches(recipe: Recipe, enough: int) -> int:
    """How many micro-batches of a step show what all hold: all of a pipeline, which keeps several
    in flight and receives each into a buffer of its own; else `enough`."""
    every = recipe.parallel.pp > 1
    return recipe.accumulation if every else min(enough, recipe.accumulation)


def runs_in(parallel: Parallel, micro_batches: int) -> bool:
    """Return whether torch's schedule accepts this number of micro-batches a step."""
    rounds = max(1, micro_batches // parallel.pp)
    return micro_batches >= parallel.pp and (parallel.virtual_pp == 1 or not micro_batches % rounds)


def why_no_pipeline(recipe: Recipe, name: str, a: Architecture) -> tuple[str, str] | None:
    """Why ranks cannot hold the blocks of a recipe one after the other, and what to use; None
    where they can."""
    parallel, micro_batches = recipe.parallel, recipe.accumulation
    pp, stages = parallel.pp, parallel.stages
    if pp == 1:
        if parallel.virtual_pp == 1:
            return None
        return (
            f"`parallel.virtual_pp: {parallel.virtual_pp}` cuts what one of several stages holds,"
            " and `parallel.pp: 1` is asked for",
            "use `parallel.pp: 2` or more, or leave `parallel.virtual_pp` out",
        )
    for found, instead in _refused(recipe, name, a):
        return f"{found}, and `parallel.pp: {pp}` is asked for", instead
    if stages > a.layers:
        return (
            f"`parallel.pp: {pp}` x `virtual_pp: {parallel.virtual_pp}` is {stages} stages, and"
            f" `{name}` has {a.layers} blocks",
            f"use at most {a.layers} stages",
        )
    if runs_in(parallel, micro_batches):
        return None
    rounds = max(1, micro_batches // pp)
    need, fitting = f"at least {pp}", pp
    if micro_batches > pp:
        need, fitting = f"a multiple of {rounds} (their number // pp)", pp * rounds
    return (
        f"`parallel.pp: {pp}` wants {need} micro-batches a step, and a rank has {micro_batches}:"
        f" {recipe.global_batch} rows / ({parallel.dp} data-parallel ranks x"
        f" `micro_batch: {recipe.micro_batch}`)",
        f"use `task.global_batch: {fitting * parallel.dp * recipe.micro_batch}`, or a smaller"
        " `micro_batch`",
    )


def _refused(recipe: Recipe, name: str, a: Architecture) -> Iterator[tuple[str, str]]:
    """What of a recipe is not built for stages, and what to use instead."""
    if not find_family(a.family).shares_products:
        known = ", ".join(families_that("shares_products"))
        problem = f"stages are written for {known}, and `{name}` is `{a.family}`"
        yield problem, f"use {OTHERWISE}"
    if a.tied_embeddings:
        problem = f"the head of `{name}` is its embedding, which the first and the last stage would"
        yield f"{problem} both hold and sum the gradients of", f"use {OTHERWISE}"
    if a.layer_kinds:
        problem = f"the blocks of `{name}` differ by their number, which a stage's begin anew"
        yield problem, f"use {OTHERWISE}"
    if recipe.method == "freeze":
        problem = "`method: freeze` may leave a stage nothing to train"
        yield problem, f"use `method: full` or `method: lora`, or {OTHERWISE}"
    if recipe.offload != "none":
        yield f"`offload: {recipe.offload}` is not built for stages", "use `offload: none`"
    if recipe.optimizer.in_backward:
        problem = "updates within backward are not built for stages"
        yield problem, "use `optimizer.in_backward: false`"
    if not find_optimizer(recipe.optimizer).updates_stages:
        problem = f"`optimizer.name: {recipe.optimizer.name}` is not proven on stages"
        yield problem, f"use one of {', '.join(optimizers_that('updates_stages'))}"
