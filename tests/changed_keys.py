"""Another value for every key of a recipe, for tests of what files say of it."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

from msgspec.structs import replace

from memfit.plan.frameworks import find_framework
from memfit.records import from_data, to_data
from memfit.records.recipe import Recipe

# another value of each key of a recipe; lists and numbers that no plan above has
OTHER = {
    "weights": {"random": "pretrained", "pretrained": "random"},
    "objective": {"pretrain": "sft", "sft": "pretrain", "dpo": "sft"},
    "base_format": {"nf4": "int8", "bf16": "fp32", "fp32": "bf16"},
    "precision": {"bf16": "bf16-mixed", "bf16-mixed": "fp16-mixed"},
    "attention": {"flash": "efficient", "efficient": "flash"},
    "loss": {"plain": "chunked", "chunked": "plain"},
    "compile": {"none": "blocks", "blocks": "none"},
    "offload": {"none": "optimizer"},
    "allocator": {"": "expandable_segments:True"},
    "optimizer.name": {"adamw": "sgd", "adamw8bit": "adamw", "adamw8bit-bnb": "adamw"},
    "optimizer.implementation": {"fused": "foreach", "foreach": "fused"},
    "options.modules_to_save": {"": "lm_head"},
    "options.liger": {"": "rope,rms_norm,swiglu"},
    "optimizer.schedule": {"cosine": "linear", "linear": "cosine"},
}
OF_ONE_VALUE = {  # options that mean something beside one value of another key
    "options.adamw8bit": lambda recipe: recipe.optimizer.name == "adamw8bit",
    "options.compares": lambda recipe: recipe.prefers,
    "options.copies_dtype": lambda recipe: recipe.options["modules_to_save"],
    "options.fp32_outputs": lambda recipe: recipe.prefers,
    "options.loss_chunks": lambda recipe: recipe.loss == "chunked",
    "options.modules_to_save": lambda recipe: recipe.method == "lora",
}
# the name of a framework's own list of values, where it is not the key's
DESCRIBED = {"optimizer.name": "optimizer", "optimizer.implementation": "implementation"}
OF_GROUPS = {  # where their keys mean something
    "lora": lambda recipe: recipe.method == "lora",
    "freeze": lambda recipe: recipe.method == "freeze",
    "preference": lambda recipe: recipe.prefers,
    "rollout": lambda recipe: recipe.samples,
    "policy": lambda recipe: recipe.samples,
    "reward": lambda recipe: recipe.samples,
    "value": lambda recipe: recipe.values,
}
OF_OWN = (  # no plan of another framework's step has them
    "lean", "qat", "selective_blocks", "optimizer.in_backward", "optimizer.stochastic_rounding",
    "optimizer.decays", "optimizer.lora_plus", "optimizer.layer_decay",
    "regularisation.label_smoothing",
    "regularisation.z_loss", "regularisation.neftune_alpha",
)  # fmt: skip
OF_SCHEDULES = tuple(  # see export/test_exported_schedules.py
    f"optimizer.{name}" for name in ("warmup_ratio", "floor", "power", "decay_ratio")
)
LATER = ("schema", "framework", "model", "device", "devices_per_node", "network", "recompute")


def keys(recipe):
    """Every dotted key that an effect of its own can be expected of, with another value."""
    for name, value in to_data(recipe).items():
        if name in LATER:
            continue
        for key, inner in ({name: value} if not isinstance(value, dict) else value).items():
            dotted = name if not isinstance(value, dict) else f"{name}.{key}"
            if not counts(recipe, dotted):
                continue
            yield dotted, another(dotted, inner, recipe)


def is_described(recipe, key, value):
    """Whether the recipe's framework has the value: no plan of it has another."""
    if recipe.framework == "memfit":
        return True
    if key in OF_OWN:
        return False
    values = find_framework(recipe.framework).values.get(DESCRIBED.get(key, key))
    return values is None or value in values


def counts(recipe, key):
    group, _, name = key.partition(".")
    if group in OF_GROUPS:
        return OF_GROUPS[group](recipe)
    if group == "parallel":
        one = recipe.framework in ("hf-trainer", "trl")  # whose one policy is `zero`
        names = ("zero",) if one else ("zero", "reshard_after_forward")
        return recipe.parallel.dp_shard > 1 and name in names
    if key in ("base_format", "method"):
        return recipe.method == "lora" and key == "base_format"
    if key == "weights":
        return recipe.framework == "memfit"  # others' plans are of no weights
    if group == "quantisation":
        return recipe.framework == "memfit" and recipe.base_format == "nf4"
    if key == "options.double_quantisation":
        return recipe.base_format in ("nf4", "fp4")
    if key in OF_ONE_VALUE:
        return OF_ONE_VALUE[key](recipe)
    if key == "options.pipeline_schedule":
        return recipe.parallel.pp > 1
    if key == "options.fsdp_version":
        return recipe.parallel.dp_shard > 1
    if key == "loss_chunk":
        return recipe.loss == "chunked"
    return key not in ("optimizer.momentum", *OF_SCHEDULES)


def another(key, value, recipe):
    group, _, name = key.partition(".")
    if key in OTHER:
        return OTHER[key][value]
    if group == "options":
        values = find_framework(recipe.framework).knobs[name].values
        others = [one for one in values if one != value]
        if others:
            return others[-1]
    if key == "lora.dropout":
        return 0.5
    if key == "recompute_blocks":
        return 0 if value else 16
    if key == "parallel.zero":
        return 2 if value == 3 else 3
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if value >= 1 or value == 0 else value / 2
    if allowed := literals(key):
        others = [one for one in allowed if one != value and one not in value]
        if isinstance(value, str):
            return others[0]
        return [*value, others[0]] if others else value[:-1]
    if isinstance(value, list | tuple):
        return ["k_proj", "o_proj"]
    return f"{value}x"


def literals(key):
    """The words that a key may have, or its items; () where any are allowed."""
    kind = Recipe
    for part in key.split("."):
        if not hasattr(kind, "__struct_fields__"):
            return ()
        kind = get_type_hints(kind)[part]
    for one in (kind, *get_args(kind)):
        if get_origin(one) is Literal:
            return get_args(one)
    return ()


def change(plan, key, value):
    data = to_data(plan.recipe)
    group, _, name = key.partition(".")
    if name:
        data[group][name] = value
    else:
        data[group] = value
    return replace(plan, recipe=from_data(data, Recipe, source="a test"))
