"""Which keys of a recipe count, and which of them a target's files have no word for."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memfit.core.wording import as_yaml
from memfit.plan.frameworks import find_framework
from memfit.records import Record, to_data
from memfit.records.habits import RunRequest
from memfit.records.recipe import ADAPTED, Parallel, Recipe
from memfit.records.request import Request

# who made the recipe and what for: at the head of every file
OF_PAIRS = ("compares", "fp32_outputs")  # options without an effect on other objectives
HEAD = ("schema", "framework", "device", "devices_per_node", "network")
# values of keys without a default that every tool has where nothing is said
PLAIN: dict[str, object] = {"loss": "plain", "loss_chunk": 0}
# keys, and groups of keys, that decide what is learned; the others change memory and time alone
LEARNS = (
    "weights", "objective", "method", "lora", "freeze", "base_format", "precision", "qat",
    "optimizer", "sequence_length", "packing", "micro_batch", "accumulation", "preference",
    "quantisation", "regularisation",
)  # fmt: skip
# of them, how it is computed; and DeepSpeed's least warm-up, one step or two, which is said
COMPUTES = (
    "optimizer.implementation", "optimizer.in_backward", "optimizer.warmup_steps",
)  # fmt: skip


def learns(key: str) -> bool:
    """Whether a dotted key of a recipe decides what is learned."""
    return key not in COMPUTES and key.partition(".")[0] in LEARNS


def find_unwritten(recipe: Recipe, says: frozenset[str]) -> dict[str, str]:
    """Keys that count in this recipe and that a target has no place for."""
    return {
        key: f"{as_yaml(value)}: no key for it"
        for key, value in list_keys(recipe)
        if key not in says and not any(key.startswith(f"{group}.") for group in says)
    }


def find_unwritten_habits(request: Request) -> dict[str, str]:
    """Keys around the steps, of evaluations and checkpoints, that no file of another tool says."""
    task, plain = request.task, RunRequest()
    names = [f"task.{name}" for name in ("evaluation", "evaluation_share") if getattr(task, name)]
    stated = to_data(request.run)
    names += [f"run.{key}" for key, value in to_data(plain).items() if stated[key] != value]
    groups = {"task": to_data(task), "run": stated}
    held = {name: groups[name.partition(".")[0]][name.partition(".")[2]] for name in names}
    return {name: f"{as_yaml(value)}: not written" for name, value in held.items()}


def list_keys(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Dotted keys with values that this recipe's step depends on; what is plain is left out."""
    plain = to_data(msgspec.structs.replace(recipe, **_defaults()))
    for name, value in to_data(recipe).items():
        if name in HEAD or (name == "model") or PLAIN.get(name) == value:
            continue
        if name == "recompute" or (name == "base_format" and recipe.method == "full"):
            continue  # `recompute_blocks` says it; no weight is frozen
        if not isinstance(value, dict):
            if name not in _defaults() or value != plain[name]:
                yield name, value
            continue
        for key, inner in value.items():
            if _counts(recipe, name, key, inner):
                yield f"{name}.{key}", inner


def _defaults() -> dict[str, object]:
    """Keys of a recipe that have a default."""
    return {
        field.name: field.default
        for field in msgspec.structs.fields(Recipe)
        if field.default is not msgspec.NODEFAULT
    }


def _counts(recipe: Recipe, group: str, key: str, value: object) -> bool:
    """Whether a nested key has an effect."""
    if group == "lora":
        return recipe.method in ADAPTED and value not in (0, 0.0, "plain")
    if group == "freeze":
        return recipe.method == group and value not in (0, [], ())
    if group == "preference":
        return recipe.compares and value not in (0, 0.0)
    if group == "parallel":
        plain = getattr(Parallel(), key, None)
        return key not in ("dp_replicate", "dp_shard") and value != plain
    if group == "options" and key in OF_PAIRS and not recipe.compares:
        return False
    if group == "options":
        knob = find_framework(recipe.framework).knobs.get(key)
        return knob is None or value != knob.default
    if group == "optimizer" and key == "momentum":
        return recipe.optimizer.name == "sgd"
    if group == "optimizer" and key in ("beta1", "beta2", "eps"):
        return recipe.optimizer.name != "sgd"
    plain = _plain(getattr(recipe, group), key)
    return value != (0 if key == "warmup_steps" else plain)


def _plain(record: Record, key: str) -> object:
    """The default of a nested key as data; NODEFAULT where it has none, and always counts."""
    field = next(each for each in msgspec.structs.fields(record) if each.name == key)
    made = field.default
    if made is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
    return to_data(made) if isinstance(made, Record) else made
