"""What was written for a tool is read back, key for key: export, then check."""

import pytest

import neighbour_plans
from changed_keys import change, keys
from memfit import api
from memfit.check import read_files
from memfit.errors import InvalidRequest
from memfit.export import find_target, list_keys
from memfit.plan.foreign import read_foreign
from memfit.plan.frameworks import find_framework

# of launchers, whose files name no model and no method, those are said beside them
UNTOLD = {"model": "llama-3.1-8b", "method": "lora"}
PLANS = {
    "trl": ("trl-qlora", "trl-full-fsdp"),
    "axolotl": ("hf-full-recompute", "hf-lora-ddp", "hf-qlora"),
    "llamafactory": ("hf-full-recompute", "hf-lora-fsdp", "hf-qlora", "deepspeed-zero3"),
    "accelerate": ("hf-lora-fsdp",),
    "deepspeed": ("deepspeed-zero2",),
    "torchtitan": ("torchtitan-fsdp", "torchtitan-3d"),
    "torchtitan-main": ("torchtitan-fsdp", "torchtitan-3d"),
}
# what the tools have and `check` refuses by its key
REFUSED = {
    "lora.scaling": "use_rslora", "parallel.zero": "zero: 2", "offload": "offload_optimizer.device",
    "parallel.reshard_after_forward": "",  # FSDP's SHARD_GRAD_OP; torchtitan's `never`
}  # fmt: skip
DESCRIBED = {"optimizer.name": "optimizer", "optimizer.implementation": "implementation"}


def read_again(made, recipe, folder, target):
    """The recipe of the files, which are not predicted."""
    files = api.write_export(made, folder)
    if len(files) > 1:
        files = [path for path in files if path.suffix != ".json"]
    each = recipe.devices_per_node or recipe.parallel.world
    data = dict(UNTOLD) if target == "accelerate" else {}
    if target == "deepspeed":
        data["model"] = "llama-3.1-8b"
    data["hardware"] = {
        "device": recipe.device, "count": each, "nodes": recipe.parallel.world // each,
    }  # fmt: skip
    return read_foreign(read_files(files, data).request)[0]


def carry(target, name, folder):
    """Keys of a plan: read back as another value, said to be left out, or refused by check."""
    plan, said = neighbour_plans.find_plan(name), find_target(target).says
    found = {"carried": set(), "left": set(), "refused": {}, "wrong": {}}
    for number, (key, value) in enumerate(keys(plan.recipe)):
        described = find_framework(plan.recipe.framework).values.get(DESCRIBED.get(key, key))
        if key not in said and key.partition(".")[0] not in said:
            continue
        if described is not None and value not in described:
            continue  # no plan of that framework has it
        try:
            changed = change(plan, key, value)
            made = api.export(changed, target)
        except InvalidRequest as error:  # the target says so
            found["refused"][key] = error.message
            continue
        if key in made.left_out:
            found["left"].add(key)
            continue
        try:
            recipe = read_again(made, plan.recipe, folder / str(number), target)
        except InvalidRequest as error:
            found["refused"][key] = error.message
            continue
        back, wanted = dict(list_keys(recipe)).get(key), dict(list_keys(changed.recipe)).get(key)
        if back == wanted:
            found["carried"].add(key)
        else:
            found["wrong"][key] = (wanted, back)
    return found


@pytest.mark.parametrize(("target", "name"), [(t, n) for t, ns in PLANS.items() for n in ns])
def test_a_changed_key_is_read_back_or_said_to_be_left_out(target, name, tmp_path):
    found = carry(target, name, tmp_path)
    assert not found["wrong"]
    assert set(found["refused"]) <= set(REFUSED)
    for key, why in found["refused"].items():
        assert REFUSED[key] in why
    assert len(found["carried"]) >= (2 if target == "accelerate" else 12)
