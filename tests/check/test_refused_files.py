"""Files that `memfit check` cannot answer for: each refused with what its user can do instead."""

import json

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest

DEVICE = {"hardware": {"device": "rtx-4090"}}
FSDP = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2,
    "num_machines": 1, "mixed_precision": "bf16", "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_sharding_strategy": "FULL_SHARD",
    },
}  # fmt: skip
QLORA = {
    "model_name_or_path": "qwen3-0.6b", "use_peft": True, "load_in_4bit": True, "bf16": True,
    "dtype": "bfloat16", "per_device_train_batch_size": 1, "max_length": 512,
}  # fmt: skip
PROGRAMS = {
    "sft.py": ("from trl import SFTConfig, SFTTrainer\nargs = SFTConfig(bf16=True)\n",
               "makes no trainer of TRL's or transformers'", "memfit.MemoryCallback"),
    "run.py": ("import torch\n\nfrom transformers import Trainer\nt = Trainer(model, args)\n",
               "known where the program runs", "states the program's arguments"),
    "fast.py": ("from unsloth import FastLanguageModel\nm = FastLanguageModel.from_pretrained('x')",
                "Unsloth, whose step is not described", "memfit plan MODEL"),
    "tune.ipynb": ('{"cells": []}', "is a program", "memfit.MemoryCallback"),
    "train.sh": ("pip install trl\npython sft.py\n", "starts a trainer", "`trl sft …`"),
    "own.sh": ("python own.py --hidden 8\n", "arguments of no trainer", "model_name_or_path"),
    "two.sh": ("trl sft --model_name_or_path a\ntrl dpo --model_name_or_path a\n",
               "holds 2 commands that train", "a file of its own"),
    "unset.sh": ("trl sft --model_name_or_path gpt2 --max_length $2\n",
                 "does not set that variable", "in its place"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_and_commands_are_told_from_configurations(name, tmp_path):
    text, said, hint = PROGRAMS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=said) as refused:
        api.check([tmp_path / name], DEVICE)
    assert hint in refused.value.hint


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 3,', '{"a": [1}', '{"a": 1}}'])
def test_half_a_json_file_is_refused_in_the_words_of_json(text, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(json.JSONDecodeError) as known:
        json.loads(text)
    with pytest.raises(InvalidRequest) as refused:
        api.check([file], DEVICE)
    assert str(known.value) in refused.value.message


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("deepspeed_configs/zero3_bf16.json", "axolotl fetch deepspeed_configs"),
        ("examples/deepspeed/ds_z3_config.json", "LLaMA-Factory's repository"),
        ("own/ds.json", "run from where `own/ds.json` can be found"),
    ],
)
def test_files_that_tools_bring_are_said_where_to_get(named, hint, tmp_path):
    file = tmp_path / "trl.yaml"
    file.write_text(json.dumps({**QLORA, "deepspeed": named}))
    with pytest.raises(InvalidRequest, match="which is not here") as refused:
        api.check([file], DEVICE)
    assert hint in refused.value.hint


def check_sharded(tmp_path, version, **changes):
    launcher, trainer = tmp_path / "fsdp.yaml", tmp_path / "trl.yaml"
    config = {**FSDP["fsdp_config"], "fsdp_version": version}
    launcher.write_text(json.dumps({**FSDP, "fsdp_config": config}))
    trainer.write_text(json.dumps({**QLORA, **changes}))
    return api.check([launcher, trainer], DEVICE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "bnb_4bit_quant_storage: uint8"),
        ({"bnb_4bit_quant_storage": "uint8"}, "bnb_4bit_quant_storage: uint8"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit: true"),
    ],
)
def test_a_base_of_integers_is_refused_under_fsdp1_which_flattens_floats_alone(
    changes, named, tmp_path
):
    """torch's own refusal: `_validate_tensors_to_flatten`, "Cannot flatten integer dtype"."""
    with pytest.raises(InvalidRequest, match=f"`{named}` in .* beside FSDP1"):
        check_sharded(tmp_path, 1, **changes)


def test_torch_refuses_to_flatten_integers():
    import torch
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    handle = object.__new__(FlatParamHandle)
    handle._use_orig_params = True
    with pytest.raises(ValueError, match="Cannot flatten integer dtype"):
        handle._validate_tensors_to_flatten([torch.zeros(2, dtype=torch.uint8)])


def test_four_bits_in_floats_are_sharded(tmp_path):
    checked, plan, *_ = check_sharded(tmp_path, 1, bnb_4bit_quant_storage="bfloat16")
    assert plan.recipe.parallel.dp_shard == 2
    assert checked.request.base_format == "nf4"
