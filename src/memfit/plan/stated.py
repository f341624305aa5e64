"""A request for many ranks as a recipe: what it states, and plain defaults for what it does not.

Nothing is searched. What was left on `auto` becomes what is plainest, and is said.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memfit.errors import InvalidRequest
from memfit.nouns import Noun
from memfit.optimizers import find_optimizer
from memfit.plan.again import find_recompute
from memfit.plan.problem import CHUNKS, Problem, first_recipe, read_problem
from memfit.recipe import Parallel, Recipe
from memfit.request import Request


class Stated(Noun, frozen=True, kw_only=True):
    """The recipe of a request, without a plan."""

    recipe: Recipe
    usable: int | None  # bytes of each device: the limit asked for or what it has
    defaults: dict[str, Any]  # knobs that were left on `auto`, and what they became
    assumptions: tuple[str, ...]


def read_stated(request: Request) -> Stated:
    """The recipe that a request states; raises InvalidRequest where its numbers do not agree.

    Plain defaults: `method: full`, `precision: bf16-mixed` (fp32 on a CPU), AdamW, fused (foreach
    where ranks cannot have it), no recomputation, `loss: plain`, `micro_batch: 1`, the first kernel
    of attention that serves, and `parallel: {dp_shard: count x nodes}`.
    """
    problem = read_problem(request, ranks=True)
    parallel = _parallel(request)
    micro = 1 if request.micro_batch == "auto" else request.micro_batch
    _check_batch(request, parallel, micro)
    recipe = _recipe(problem, parallel, micro)
    found = {
        "method": recipe.method,
        "precision": recipe.precision,
        "optimizer.name": recipe.optimizer.name,
        "optimizer.implementation": recipe.optimizer.implementation,
        "optimizer.learning_rate": recipe.optimizer.learning_rate,
        "recompute": "none",
        "attention": recipe.attention,
        "loss": recipe.loss,
        "micro_batch": micro,
        "parallel": f"dp_shard {parallel.dp_shard}",
    }
    left = {key: value for key, value in found.items() if _asked(request, key) == "auto"}
    return Stated(
        recipe=recipe, usable=problem.usable, defaults=left, assumptions=problem.assumptions
    )


def _asked(request: Request, key: str) -> object:
    group, _, name = key.rpartition(".")
    return getattr(getattr(request, group) if group else request, name)


def _recipe(problem: Problem, parallel: Parallel, micro: int) -> Recipe:
    request = problem.request
    method = "full" if request.method == "auto" else request.method
    precision = request.precision
    if precision == "auto":
        precision = "fp32" if problem.device.is_cpu else "bf16-mixed"
    recompute = find_recompute(request.recompute, problem.model.architecture.layers)
    chunked = request.loss == "chunked"
    plain = first_recipe(problem, method=method, precision=precision)
    optimizer = plain.optimizer
    family = find_optimizer(optimizer)
    can = [i for i in family.implementations if i not in family.unsharded_only]
    undecided = request.optimizer.implementation == "auto"
    if undecided and can and optimizer.implementation not in can:
        optimizer = replace(optimizer, implementation=can[0])
    return replace(
        plain,
        optimizer=optimizer,
        recompute_blocks=recompute.full,
        selective_blocks=recompute.selective,
        loss="chunked" if chunked else "plain",
        loss_chunk=(request.loss_chunk or CHUNKS[0]) if chunked else 0,
        micro_batch=micro,
        accumulation=request.task.global_batch // (parallel.world * micro),
        parallel=parallel,
    )


def _parallel(request: Request) -> Parallel:
    """The mesh asked for, of as many ranks as there are devices."""
    devices, hardware = request.devices, request.hardware
    if request.parallel == "auto":
        return Parallel(dp_shard=devices)
    asked = request.parallel
    if asked.world != devices:
        raise InvalidRequest(
            f"`parallel` names {asked.world} ranks ({asked.dp_replicate} x {asked.dp_shard}), but"
            f" `hardware` has {devices} devices: `count: {hardware.count}` x"
            f" `nodes: {hardware.nodes}`",
            hint="one rank a device: make the two products equal",
        )
    return asked.stated


def _check_batch(request: Request, parallel: Parallel, micro: int) -> None:
    batch, each = request.task.global_batch, parallel.world * micro
    if batch % each:
        raise InvalidRequest(
            f"`task.global_batch: {batch}` is not a multiple of {each}: {parallel.world} ranks x"
            f" `micro_batch: {micro}`",
            hint=f"use `global_batch: {-(-batch // each) * each}`, or fewer ranks",
        )
