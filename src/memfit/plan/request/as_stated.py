"""A request for many ranks that no plan describes, as a recipe: what it states, and plain defaults.

A certificate needs no prediction: it is of what the request states. Nothing is searched; what was
left on `auto` becomes the plainest choice, which is listed.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.plan.request.meshes import check_batch, check_described, stated_mesh
from memfit.plan.request.problem import (
    CHUNKS,
    Problem,
    check_own_step,
    first_recipe,
    read_own_problem,
)
from memfit.plan.simulate.recompute import find_recompute
from memfit.records import Record
from memfit.records.recipe import Parallel, Recipe
from memfit.records.request import Request


class Stated(Record, frozen=True, kw_only=True):
    """The recipe of a request, without a plan."""

    recipe: Recipe
    usable: int | None  # bytes of each device: the limit asked for or what it has
    defaults: dict[str, Any]  # knobs that were left on `auto`, and what they became
    assumptions: tuple[str, ...]
    because: str = ""  # why no plan describes it, and what is certified instead


def read_unplanned(request: Request) -> Stated | None:
    """What a request states that many ranks can run and no plan describes; None of any other.

    Raises InvalidRequest where its numbers do not agree, and for another framework's step.
    """
    check_own_step(request.framework)
    try:
        check_described(request)
    except InvalidRequest as refusal:
        stated = read_stated(request)  # of one's own mistakes it says the same
        became = ", ".join(f"{key}: {value}" for key, value in stated.defaults.items())
        because = f"{refusal.message}; certified as stated"
        because += f", with plain defaults ({became})" if became else ""
        return replace(stated, because=because)
    return None


def read_stated(request: Request) -> Stated:
    """The recipe that a request states; raises InvalidRequest where its numbers do not agree.

    Plain defaults: `method: full`, `precision: bf16-mixed` (fp32 on a CPU), AdamW, fused (foreach
    where ranks cannot have it), no recomputation, `loss: plain`, `micro_batch: 1`, the first kernel
    of attention that serves, and `parallel: {dp_shard: count x nodes}`.
    """
    problem = read_own_problem(request)
    parallel = stated_mesh(request)
    micro = 1 if request.micro_batch == "auto" else request.micro_batch
    check_batch(request, parallel)
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
    left = {key: value for key, value in found.items() if _stated(request, key) == "auto"}
    return Stated(
        recipe=recipe, usable=problem.usable, defaults=left, assumptions=problem.assumptions
    )


def _stated(request: Request, key: str) -> object:
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
    plain = first_recipe(problem, method=method, precision=precision, parallel=parallel)
    return replace(
        plain,
        recompute_blocks=recompute.full,
        selective_blocks=recompute.selective,
        loss="chunked" if chunked else "plain",
        loss_chunk=(request.loss_chunk or CHUNKS[0]) if chunked else 0,
        micro_batch=micro,
        accumulation=request.global_batch // (parallel.dp * micro),
    )
