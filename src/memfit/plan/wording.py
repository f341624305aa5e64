"""A candidate in the words of a request: to state it, to type it, to name it in a line."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from memfit.plan.frameworks import Framework
from memfit.recipe import Recipe
from memfit.request import ParallelRequest, RecomputeBlocks, Request

LABELS = (
    ("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("virtual_pp", "vpp"), ("ep", "ep"),
    ("dp_shard", "dp_shard"), ("dp_replicate", "dp_replicate"),
)  # fmt: skip


def state(request: Request, recipe: Recipe, framework: Framework) -> Request:
    """The request with everything stated that a candidate decides."""
    changes = words(request, recipe, framework)
    mesh = {key.partition(".")[2]: v for key, v in changes.items() if key.startswith("parallel.")}
    own = {key.partition(".")[2]: v for key, v in changes.items() if key.startswith("options.")}
    asked = request.parallel if request.parallel != "auto" else ParallelRequest()
    recompute: Any = changes["recompute"]
    if isinstance(recompute, dict):
        recompute = RecomputeBlocks(**recompute)
    return structs.replace(
        request,
        parallel=structs.replace(asked, **mesh),
        options={**request.options, **own},
        recompute=recompute,
        optimizer=structs.replace(
            request.optimizer, implementation=changes["optimizer.implementation"]
        ),
        **{key: changes[key] for key in ("micro_batch", "attention", "compile")},
    )


def words(request: Request, recipe: Recipe, framework: Framework) -> dict[str, Any]:
    """What `--set` takes to state a candidate: key of the request -> value."""
    p, plain = recipe.parallel, ParallelRequest()
    mesh = {
        f"parallel.{name}": getattr(p, name)
        for name in framework.axes
        if getattr(p, name) != getattr(plain, name)
    }
    options = {
        f"options.{name}": value
        for name, value in recipe.options.items()
        if value != framework.knobs[name].default and request.options.get(name) != value
    }
    return {
        **mesh,
        "micro_batch": recipe.micro_batch,
        "recompute": _recompute_word(recipe),
        "attention": recipe.attention,
        "compile": recipe.compile,
        "optimizer.implementation": recipe.optimizer.implementation,
        **options,
    }


def _recompute_word(recipe: Recipe) -> str | dict[str, int]:
    if not recipe.recompute_blocks:
        return "none"
    return "selective" if recipe.recompute == "selective" else {"blocks": recipe.recompute_blocks}


def describe(recipe: Recipe) -> str:
    """A candidate in one line; axes of one rank are left out."""
    p = recipe.parallel
    axes = [f"{word} {n}" for name, word in LABELS if (n := getattr(p, name)) > 1]
    mesh = " x ".join(axes) or "one device"
    again = {"none": "none", "selective": "selective"}
    word = _recompute_word(recipe)
    recompute = again[word] if isinstance(word, str) else f"{word['blocks']} blocks"
    sequence = ", sequence parallel" if p.sequence_parallel else ""
    compiled = "" if recipe.compile == "none" else f", compiled {recipe.compile}"
    said = f"{mesh}{sequence}, micro-batch {recipe.micro_batch}, recompute {recompute}"
    return f"{said}, attention {recipe.attention}{compiled}"
