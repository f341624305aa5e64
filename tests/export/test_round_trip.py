"""What was written for a tool is read back, key for key: export, then check."""

import pytest
from msgspec.structs import replace

import neighbour_plans
from changed_keys import change, is_described, keys
from memfit import api
from memfit.check import read_files
from memfit.core.errors import InvalidRequest
from memfit.export import list_keys
from memfit.export.settle import name_in_request
from memfit.export.target import find_target
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.wording import restate
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.request import Request

# of launchers, whose files name no model and no method, those are said beside them
UNTOLD = {"model": "llama-3.1-8b", "method": "lora"}
PLANS = {
    "trl": ("trl-qlora", "trl-full-fsdp", "deepspeed-zero3"),
    "axolotl": ("hf-full-recompute", "hf-lora-ddp", "hf-qlora", "hf-full-fsdp2"),
    "llamafactory": (
        "hf-full-recompute",
        "hf-lora-fsdp",
        "hf-qlora",
        "deepspeed-zero3",
        "hf-full-fsdp2",
    ),
    "accelerate": ("hf-lora-fsdp", "hf-full-fsdp2"),
    "deepspeed": ("deepspeed-zero2",),
    "torchtitan": ("torchtitan-fsdp", "torchtitan-3d"),
    "torchtitan-main": ("torchtitan-fsdp", "torchtitan-3d"),
}  # fmt: skip
# keys of a recipe that are said of the task
IN_REQUEST = {"steps": "task.steps", "objective": "task.objective"}
# what the tools have and `check` refuses by its key
REFUSED = {
    "parallel.zero": "zero: 2", "offload": "offload_optimizer.device",
    "optimizer.name": "the Trainer's sgd has none",  # of momentum
    "precision": "`precision: fp16",
    "objective": "`objective: sft` cannot be written for `torchtitan",
    "packing": "rows are full", "base_format": "weights are of the computed dtype",
    "loss": "what it does to the head's shards is not described",
    "options.paged": "it takes no weights that are cut",
    "parallel.reshard_after_forward": "",  # FSDP's SHARD_GRAD_OP; torchtitan's `never`
}  # fmt: skip


def read_again(made, recipe, folder, target):
    """What `check` takes from the files."""
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
    return read_files(files, data).request


def carry(target, name, folder):
    """Keys of a plan: read back as another value, said to be left out, or refused by check."""
    # on a device where it fits: of what does not, open knobs are decided again
    wide = api.change(neighbour_plans.find_request(name), {"hardware.device": "h100-sxm"})
    plan, said = api.predict(wide), find_target(target).says
    found = {"carried": set(), "left": {}, "refused": {}, "wrong": {}}
    for number, (key, value) in enumerate(keys(plan.recipe)):
        if key not in said and key.partition(".")[0] not in said:
            continue
        if not is_described(plan.recipe, key, value):
            continue
        try:
            changed = ask(plan, key, value)
            made = api.export(changed, target)
        except InvalidRequest as error:  # the target says so
            found["refused"][key] = error.message
            continue
        told = {**made.left_out, **made.changed}
        try:
            recipe = read_defaults(read_again(made, plan.recipe, folder / str(number), target))[0]
        except InvalidRequest as error:
            found["left" if key in {**made.left_out, **made.changed} else "refused"][key] = (
                error.message
            )
            continue
        back, wanted = dict(list_keys(recipe)).get(key), dict(list_keys(changed.recipe)).get(key)
        if key == "objective" and target == "trl":  # which follows from the records: a note says it
            noted = made.notes != api.export(plan, target).notes
            found["left" if noted else "wrong"][key] = made.notes
        elif key in told:  # and then the file has no word of it
            found["left" if back != wanted else "wrong"].update({key: (wanted, back)})
        elif back == wanted:
            found["carried"].add(key)
        else:
            found["wrong"][key] = (wanted, back)
    return found


def ask(plan, key, value):
    """The plan of a request that states the other value: an export keeps it, or refuses it."""
    changed = change(plan, key, value)
    stated = {IN_REQUEST.get(key, name_in_request(key)): value}
    if key == "recompute_blocks":
        stated = {"recompute": restate(changed).recompute}
    elif key in ("micro_batch", "accumulation"):
        stated["task.global_batch"] = changed.recipe.global_batch
        stated.pop("accumulation", None)
    return replace(changed, request=api.change(plan.request, stated))


# whose method, mesh and recomputing other plans of the same tool have
LIKE_OTHERS = (("trl", "trl-full-fsdp"), ("axolotl", "hf-full-recompute"))
PAIRS = [
    pytest.param(target, name, marks=[pytest.mark.wide] if (target, name) in LIKE_OTHERS else [])
    for target, names in PLANS.items() for name in names
]  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize(("target", "name"), PAIRS)
def test_a_changed_key_is_read_back_or_said_to_be_left_out(target, name, tmp_path):
    found = carry(target, name, tmp_path)
    assert not found["wrong"]
    assert not {k: v for k, v in found["refused"].items() if k not in REFUSED}
    for key, why in found["refused"].items():
        assert REFUSED[key] in why
    assert len(found["carried"]) >= (2 if target == "accelerate" else 12)


FULL = ("own-full", "own-qlora", "torchtitan-fsdp", "deepspeed-zero3", "hf-full-fsdp2")


@pytest.mark.covering
@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((target, name) for target in ("axolotl", "llamafactory", "trl") for name in FULL),
        ("torchtitan", "own-full"), ("torchtitan", "megatron-3d"),
    ],
)  # fmt: skip
def test_the_peak_that_an_export_claims_is_what_check_answers_of_it(target, name, tmp_path):
    plan = neighbour_plans.find_plan(name)
    made = api.export(plan, target)
    found = predict_request(read_again(made, plan.recipe, tmp_path, target)).memory
    assert made.peak.peak_allocated == found.peak_allocated
    assert made.peak.device_total == found.device_total


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "trl"])
def test_a_trainers_optimizer_beside_zero_is_read_back(target, tmp_path):
    more = {"options": {"paged": True}, "optimizer": {"name": "adamw8bit"}}
    request = neighbour_plans.REQUESTS["deepspeed-zero2"] | more
    plan = api.predict(from_data(request, Request, source="request"))
    made = api.export(plan, target)
    assert not [key for key in made.left_out if key.startswith("optimizer")]
    found = predict_request(read_again(made, plan.recipe, tmp_path, target))
    assert found.recipe.optimizer.name == "adamw8bit"
    assert found.recipe.options["paged"]
    assert found.memory.peak_allocated == made.peak.peak_allocated


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "trl"])
def test_what_deepspeeds_file_says_beside_a_trainers_is_read_back(target, ranks, tmp_path):
    """Its stage, sizes and what waits on the host: keys that the trainer's own file has not."""
    request = {
        **neighbour_plans.REQUESTS["deepspeed-zero3"], "offload": "parameters",
        "hardware": {"device": "h100-sxm", "count": ranks},
        "parallel": {"dp_shard": ranks, "zero": 3},
        "options": {"reduce_bucket_size": 0, "prefetch_bucket_size": 10**6},
    }  # fmt: skip
    for zero, offload in ((3, "parameters"), (2, "optimizer")):
        asked = request | {"offload": offload, "parallel": {"dp_shard": ranks, "zero": zero}}
        plan = api.predict(from_data(asked, Request, source="request"))
        made = api.export(plan, target)
        sizes = {"options.reduce_bucket_size", "options.prefetch_bucket_size"}
        assert not {"offload", "parallel.zero", *sizes} & made.left_out.keys()
        files = read_again(made, plan.recipe, tmp_path / str(zero), target)
        found = predict_request(files)
        assert (found.recipe.parallel.zero, found.recipe.offload) == (zero, offload)
        assert found.recipe.options["reduce_bucket_size"] == 0
        assert found.memory.peak_allocated == made.peak.peak_allocated


@pytest.mark.parametrize(("target", "version"), [("trl", 1), ("llamafactory", 1), ("axolotl", 2)])
def test_offloaded_fp32_shards_are_written_and_read_back(target, version, tmp_path):
    changes = {"offload": "parameters", "options.fsdp_version": version}
    plan = api.predict(api.change(neighbour_plans.find_request("hf-full-fsdp2"), changes))
    made = api.export(plan, target)
    found = predict_request(read_again(made, plan.recipe, tmp_path, target))
    recipe = found.recipe
    assert (recipe.offload, recipe.precision) == ("parameters", "bf16-mixed")
    assert recipe.options["fsdp_version"] == version
    assert made.peak.peak_allocated == found.memory.peak_allocated
    assert not {"offload", "precision", "options.fsdp_version"} & made.left_out.keys()


@pytest.mark.parametrize(("changes", "reenters"), [
    ({}, True), ({"recompute": "none"}, False), ({"method": "full"}, False),
    ({"parallel": {"dp_shard": 8, "zero": 2}}, False),
])  # fmt: skip
def test_trl_makes_the_blocks_of_adapters_in_zero_3_reentrant(tmp_path, changes, reenters):
    """And its export claims the peak of that, whatever the plan's blocks are."""
    hardware = {"hardware": {"device": "h100-sxm", "count": 8}}
    asked = {
        "model": "llama-3.2-1b", "framework": "deepspeed", "method": "lora", "recompute": "full",
        "task": {"objective": "sft", "sequence_length": 2048, "global_batch": 32},
        "micro_batch": 4, "parallel": {"dp_shard": 8}, **hardware, **changes,
    }  # fmt: skip
    made = api.export(api.predict(from_data(asked, Request, source="the test")), "trl")
    files = [path for path in api.write_export(made, tmp_path) if path.suffix == ".yaml"]
    checked = api.check(files, hardware)[1]
    assert made.peak.peak_allocated == checked.memory.peak_allocated
    assert ("options.reentrant" in made.changed) == reenters
    assert bool(checked.recipe.options["reentrant"]) == reenters
