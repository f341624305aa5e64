"""A candidate or a plan in the words of a request: to state it, to type it, to name it."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from memfit.objectives import find_objective
from memfit.plan.frameworks import Framework, find_framework
from memfit.plan.request.assumed import is_estimated
from memfit.records import from_data, to_data
from memfit.records.recipe import ADAPTED, Parallel, Recipe
from memfit.records.request import LoraRequest, RecomputeBlocks, Request
from memfit.records.results import Plan

LABELS = (
    ("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("virtual_pp", "vpp"), ("ep", "ep"),
    ("dp_shard", "dp_shard"), ("dp_replicate", "dp_replicate"),
)  # fmt: skip


def state_preference(recipe: Recipe) -> dict[str, Any]:
    """How a recipe compares pairs, in a request's words: `auto` where its loss has no such key."""
    found = {name: value or "auto" for name, value in to_data(recipe.preference).items()}
    found["label_smoothing"] = recipe.preference.label_smoothing
    found["center"] = recipe.preference.center
    if recipe.preference.loss_type == "simpo":
        found["gamma"] = recipe.preference.gamma
    if find_objective(recipe.objective).learns:
        found["cross_entropy"] = recipe.preference.cross_entropy
    if recipe.preference.reference == "none":
        found["reference"] = "auto"
    return found


def state(request: Request, recipe: Recipe, framework: Framework) -> Request:
    """The request with everything stated that a candidate decides."""
    changes = words(request, recipe, framework)
    mesh = {key.partition(".")[2]: v for key, v in changes.items() if key.startswith("parallel.")}
    own = {key.partition(".")[2]: v for key, v in changes.items() if key.startswith("options.")}
    requested = request.parallel if request.parallel != "auto" else Parallel()
    recompute: Any = changes["recompute"]
    if isinstance(recompute, dict):
        recompute = RecomputeBlocks(**recompute)
    return structs.replace(
        request,
        parallel=structs.replace(requested, **mesh),
        options={**request.options, **own},
        recompute=recompute,
        optimizer=structs.replace(
            request.optimizer, implementation=changes["optimizer.implementation"]
        ),
        **{key: changes[key] for key in ("micro_batch", "attention", "compile")},
    )


def words(request: Request, recipe: Recipe, framework: Framework) -> dict[str, Any]:
    """What `--set` takes to state a candidate: key of the request -> value."""
    p, plain = recipe.parallel, Parallel()
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
    words = {"none": "none", "selective": "selective"}
    word = _recompute_word(recipe)
    recompute = words[word] if isinstance(word, str) else f"{word['blocks']} blocks"
    sequence = ", sequence parallel" if p.sequence_parallel else ""
    compiled = "" if recipe.compile == "none" else f", compiled {recipe.compile}"
    text = f"{mesh}{sequence}, micro-batch {recipe.micro_batch}, recompute {recompute}"
    return f"{text}, attention {recipe.attention}{compiled}"


def restate(plan: Plan) -> Request:
    """A request whose prediction is the plan's own recipe, of another framework's step."""
    recipe, request = plan.recipe, plan.request
    framework = find_framework(recipe.framework)
    recompute: Any = recipe.recompute if recipe.recompute_blocks else "none"
    if framework.recomputes_some and recipe.recompute_blocks and recompute == "full":
        recompute = {"blocks": recipe.recompute_blocks}
    data = to_data(request) | {
        "framework": recipe.framework,
        "method": recipe.method,
        "precision": recipe.precision,
        "attention": recipe.attention,
        "recompute": recompute,
        "compile": recipe.compile,
        "offload": recipe.offload,
        "loss": recipe.loss,
        "loss_chunk": recipe.loss_chunk,
        "lean": "none",
        "micro_batch": recipe.micro_batch,
        "parallel": to_data(recipe.parallel),
        "options": dict(recipe.options),
        "seed": recipe.seed,
        "allocator": recipe.allocator,
    }
    data["base_format"] = recipe.base_format if recipe.method != "full" else "auto"
    data["optimizer"] = {
        k: v for k, v in to_data(recipe.optimizer).items()
        if k not in ("in_backward", "stochastic_rounding")
        and (v or k not in ("power", "decay_ratio"))  # of another schedule
    }  # fmt: skip
    lora = recipe.lora if recipe.method in ADAPTED else LoraRequest()
    data["lora"] = to_data(lora)
    data["freeze"] = to_data(recipe.freeze)
    if recipe.compares:
        data["preference"] = state_preference(recipe)
    data["task"] |= {
        "objective": recipe.objective, "sequence_length": recipe.sequence_length,
        "packing": recipe.packing, "global_batch": recipe.global_batch,
    }  # fmt: skip
    if recipe.steps and not is_estimated(request.task):
        data["task"] |= {"steps": recipe.steps, "epochs": None, "tokens": None}
    each = recipe.devices_per_node or recipe.parallel.world
    data["hardware"] |= {
        "device": recipe.device, "count": each, "nodes": recipe.parallel.world // each,
    }  # fmt: skip
    return from_data(data, Request, source="the plan")
