"""A reward model's adapter in a folder, as peft stores it: what it is, and whether it stands on a
base. Read from `adapter_config.json` and the header of `adapter_model.safetensors`, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.adapters.shared.peft_layers import PREFIX, REWARD, adapt
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import is_folder, read_json_table
from memfit.families import read_model
from memfit.families.weight_files.headers import read_shapes
from memfit.records.model import REWARD_SCORE, SCORE, Model
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import ADAPTER, RewardAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAIN = "train it with memfit's `objective: reward` and `method: lora`, or with peft as SEQ_CLS"
# keys of peft's configuration that change what is added, with the values that do not
PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "use_dora": (False, None), "bias": ("none", None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "layers_to_transform": (None,),
    "layer_replication": (None,), "target_parameters": (None, []), "exclude_modules": (None,),
    "lora_bias": (False, None),
    "modules_to_save": (["score"], ["classifier", "score"]),  # peft names heads of either kind
}  # fmt: skip


def is_stored(folder: str) -> bool:
    """Whether there is an adapter at all, so that nothing needs to be stated of it."""
    return bool(folder) and is_folder(Path(folder)) and (Path(folder) / CONFIG).is_file()


def read_stored(folder: str) -> RewardAdapter:
    """What the folder's configuration says. Raises InvalidRequest for anything but plain LoRA with
    a trained score head."""
    config = _read_config(folder)
    for key, plain in PLAIN.items():
        if config.get(key) not in plain:
            raise InvalidRequest(
                f"`{_spec(folder)}`: its `{CONFIG}` has `{key}: {config.get(key)}`, and a reward is"
                f" made by `{key}: {plain[0]}`",
                hint=TRAIN,
            )
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise InvalidRequest(
            f"`{_spec(folder)}`: its `{CONFIG}` has `target_modules: {targets}`, which is no list"
            " of names",
            hint="write the names of its projections in its place",
        )
    scaling = config.get("use_rslora")
    return RewardAdapter(
        rank=int(config.get("r", 0)), alpha=float(config.get("lora_alpha", 0)),
        targets=tuple(sorted(map(str, targets))),
        scaling="rank-stabilised" if scaling else "plain",
    )  # fmt: skip


def check_stored(recipe: Recipe) -> None:
    """Raise InvalidRequest where a recipe's reward adapter is not there, or not for its base."""
    settings = recipe.reward
    folder = settings.adapter_folder
    if not folder:
        return
    found = read_stored(folder)
    stated = settings.adapter
    for name in stated.__struct_fields__:
        have, want = getattr(found, name), getattr(stated, name)
        if (set(have) if name == "targets" else have) != (set(want) if name == "targets" else want):
            raise InvalidRequest(
                f"`reward.adapter.{name}` is {_show(want)}, and `{folder}` has {_show(have)}",
                hint="leave `reward.adapter` out, and plan again",
            )
    check_base(folder, recipe)
    _check_tensors(folder, adapt(read_model(recipe.model), recipe))


def check_base(folder: str, recipe: Recipe) -> None:
    """Raise InvalidRequest where the folder names another base than the recipe's."""
    base, own = _read_config(folder).get("base_model_name_or_path"), recipe.model.source
    if base and not _same_place(str(base), own):
        raise InvalidRequest(
            f"`{_spec(folder)}` is an adapter of `{base}`, and the model is"
            f" `{own or recipe.model.name}`: a reward is made on the base that the policy has",
            hint=f"use `model: {base}`; or, where both are the same weights, change"
            f" `base_model_name_or_path` in its `{CONFIG}`",
        )


def stored_names(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of each row of the reward's adapter and head: its tensor's name in peft's file, and shape."""
    own = f".{REWARD}."
    return {
        row.name: (row.name.replace(own, ".").replace(REWARD_SCORE, SCORE), row.shape)
        for row in model.weights
        if (".lora_" in row.name and own in row.name) or row.name == PREFIX + REWARD_SCORE
    }


def _check_tensors(folder: str, model: Model) -> None:
    file = Path(folder) / WEIGHTS
    try:
        have = read_shapes(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"cannot read `{file}`: {error}", hint=TRAIN) from None
    want = dict(stored_names(model).values())
    for name, shape in want.items():
        if name not in have:
            head = name == PREFIX + SCORE
            raise InvalidRequest(
                f"`{file}` has no tensor `{name}`" + (", the score's head" if head else ""),
                hint=TRAIN if head else "its targets are not those of this model",
            )
        if have[name] != shape:
            raise InvalidRequest(
                f"`{name}` in `{file}` has shape {have[name]}, and this base needs {shape}",
                hint="a reward is one number: train with `num_labels=1`"
                if name == PREFIX + SCORE and have[name][1:] == shape[1:]
                else "the adapter is of another model",
            )
    if strange := sorted(set(have) - set(want)):
        raise InvalidRequest(
            f"`{file}` has a tensor `{strange[0]}`, which no target of `{CONFIG}` has", hint=TRAIN
        )


def _read_config(folder: str) -> Mapping[str, Any]:
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise InvalidRequest(
            f"`{_spec(folder)}`: there is no `{file}`",
            hint="to plan before it is trained, state `reward.adapter: {rank: 16, alpha: 32,"
            " targets: [q_proj, v_proj]}`",
        )
    return read_json_table(file)


def _same_place(one: str, other: str) -> bool:
    if one == other:
        return True
    first, second = Path(one), Path(other)
    return bool(other) and is_folder(first) and is_folder(second) and first.samefile(second)


def _spec(folder: str) -> str:
    return f"reward.funcs: {ADAPTER}{folder}"


def _show(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else f"{value}"
