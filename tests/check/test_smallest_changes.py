"""What `memfit check` would change in a file: it fits, nothing less does, and a patch says it."""

import json

import pytest

from memfit import api
from memfit.check.smaller_changes import KEEPS, find, smaller
from memfit.cli.app import app, run
from memfit.records.request import read_yaml
from memfit.workflows.load_inputs import put

CARD = {"hardware": {"device": "rtx-4090"}}
AXOLOTL = """\
base_model: llama-3.1-8b  # kept
sequence_len: {length}
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
adapter: lora
lora_target_linear: true
bf16: auto
gradient_checkpointing: false
datasets:
  - path: a
    type: alpaca
"""
TRL = "model_name_or_path: llama-3.1-8b\nuse_peft: true\nmax_length: 4096\n"
FACTORY = "model_name_or_path: llama-3.1-8b\nfinetuning_type: full\nstage: sft\nbf16: true\n"


def smallest(path, data):
    _, plan = api.check([path], data)
    assert plan.memory.verdict != "fits"
    return api.find_changes([path], data, plan)


def edited(path, change, without=()):
    """The file with the change made, but for some of its keys."""
    data = read_yaml(path)
    for one in change.edited:
        if one.key not in without:
            put(data, one.key, one.after)
    target = path.with_name(f"edited-{path.name}")
    target.write_text(json.dumps(data))  # YAML, too
    return target


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(("name", "text", "device"), [
    ("axolotl.yaml", AXOLOTL.format(length=2048), "rtx-4090"),
    ("axolotl.yaml", AXOLOTL.format(length=8192), "rtx-4090"),
    ("axolotl.yaml", AXOLOTL.format(length=8192), "h100-sxm"),
    ("trl.yaml", TRL, "rtx-4090"),
    ("lf.yaml", FACTORY, "rtx-4090"),
])  # fmt: skip
def test_a_change_fits_and_no_key_of_it_is_idle(tmp_path, name, text, device):
    data = {"hardware": {"device": device}}
    path = write(tmp_path, name, text)
    for change in smallest(path, data):
        _, plan = api.check([edited(path, change)], data)
        assert plan.memory.verdict == "fits"
        assert plan.memory.needed == change.needed
        for key in {one.key for one in change.edited}:
            idle = {key}
            if "adapter" in key or "load_in" in key:  # one edit of several keys
                idle = {"adapter", "load_in_4bit", "load_in_8bit"}
            if "accumulation" in key or key.endswith("batch_size"):
                idle = {o.key for o in change.edited if "accumulation" in o.key or "batch" in o.key}
            _, less = api.check([edited(path, change, without=idle)], data)
            assert less.memory.verdict != "fits", key


def test_what_is_learned_stays_where_it_can(tmp_path):
    """Recomputing is enough on the larger device, and nothing else is then proposed."""
    path = write(tmp_path, "axolotl.yaml", AXOLOTL.format(length=8192))
    keeps = {
        device: {one.keeps for one in smallest(path, {"hardware": {"device": device}})}
        for device in ("h100-sxm", "rtx-4090")
    }
    assert keeps == {"h100-sxm": {KEEPS[0]}, "rtx-4090": {KEEPS[2]}}


def test_smaller_pieces_make_the_same_global_batch(tmp_path):
    path = write(tmp_path, "trl.yaml", TRL)
    (change, *_) = smallest(path, CARD)
    _, before = api.check([path], CARD)
    _, after = api.check([edited(path, change)], CARD)
    assert after.recipe.micro_batch < before.recipe.micro_batch
    for plan in (before, after):
        assert plan.recipe.micro_batch * plan.recipe.accumulation == 8


def test_weights_that_are_cut_are_given_an_optimizer_that_takes_them(tmp_path):
    """Under FSDP2 torchao's: bitsandbytes' would fail at its first step."""
    text = (
        "model_name_or_path: qwen3-8b\nfsdp: full_shard\nper_device_train_batch_size: 1\n"
        "max_length: 512\nbf16: true\n"
    )
    data = {"hardware": {"device": "a100-sxm-40", "count": 3}}
    (change, *_) = smallest(write(tmp_path, "trl.yaml", text), data)
    assert {one.key: one.after for one in change.edited} == {"optim": "adamw_torch_8bit"}


def test_a_launchers_file_is_changed_where_it_says_it(tmp_path):
    """DeepSpeed's stage stands in a file that the trainer's names."""
    zero = write(tmp_path, "ds.json", json.dumps({"zero_optimization": {"stage": 1}}, indent=4))
    trainer = FACTORY.replace("llama-3.1-8b", "qwen3-14b") + "deepspeed: ds.json\n"
    path = write(tmp_path, "lf.yaml", trainer +
                 "per_device_train_batch_size: 1\n")  # fmt: skip
    data = {"hardware": {"device": "h100-sxm", "count": 8}}
    (change, *_) = smallest(path, data)
    assert [(one.file, one.key, one.before) for one in change.edited] == [
        (str(zero), "zero_optimization.stage", 1)
    ]
    patch = api.make_patch(change)
    assert f'-        "stage": 1\n+        "stage": {change.edited[0].after}\n' in patch


def test_states_and_weights_go_to_the_host_where_no_stage_is_enough(tmp_path, capsys):
    """An 8B whole on one card: and what the host must have for it is said."""
    text = json.dumps({"zero_optimization": {"reduce_bucket_size": 5e8, "stage": 2}}, indent=2)
    zero = write(tmp_path, "ds.json", text.replace("500000000.0", "5e8"))
    more = "deepspeed: ds.json\nper_device_train_batch_size: 1\ncutoff_len: 2048\n"
    path = write(tmp_path, "lf.yaml", FACTORY + more)
    (change, *_) = smallest(path, CARD)
    assert {one.key: one.after for one in change.edited} == {
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_param.device": "cpu",
        "zero_optimization.stage": 3,
    }
    trained = 8030261248
    assert change.assumed == (
        f"the host has {18 * trained / 2**30:.2f} GiB to spare for weights, gradients and states,"
        " which no verdict counts",
    )
    words = ("check", str(path), "--device", "rtx-4090", "--why")
    assert run(lambda: app.main([*words], standalone_mode=False)) == 3
    assert change.assumed[0] in " ".join(capsys.readouterr().out.split())
    lines = api.make_patch(change).splitlines()
    assert [line for line in lines if line[:1] == "-"][1:] == ['-    "stage": 2']
    assert any("5e8" in line for line in lines)  # as it was written
    edited(zero, change).rename(zero)
    assert api.check([path], CARD)[1].memory.needed == change.needed


def test_fsdps_shards_go_to_the_host(tmp_path):
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "num_processes: 8\nfsdp_config: {fsdp_activation_checkpointing: true,"
        " fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    launch = write(tmp_path, "accelerate.yaml", text)
    trl = "model_name_or_path: llama-3.1-8b\nmax_length: 4096\nper_device_train_batch_size: 1\n"
    path = write(tmp_path, "trl.yaml", trl)
    data = {"hardware": {"device": "rtx-4090", "count": 8}}
    _, plan = api.check([path, launch], data)
    found = api.find_changes([path, launch], data, plan)
    keys = [{one.key: one.after for one in change.edited} for change in found]
    assert {"fsdp_config.fsdp_offload_params": True} in keys


def test_a_patch_keeps_comments_and_touches_nothing_else(tmp_path, capsys):
    path = write(tmp_path, "axolotl.yaml", AXOLOTL.format(length=2048))
    words = ("check", str(path), "--device", "rtx-4090", "--why")
    assert run(lambda: app.main([*words, "--patch"], standalone_mode=False)) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"--- {path}", f"+++ {path}"]
    (change, *_) = smallest(path, CARD)
    known = sum(one.before is not None for one in change.edited)
    assert sum(line.startswith("-") for line in lines[1:]) == known
    assert sum(line.startswith("+") for line in lines[2:]) == len(change.edited)
    assert " base_model: llama-3.1-8b  # kept" in lines


def test_where_nothing_helps_it_is_said(tmp_path, capsys):
    path = write(tmp_path, "lf.yaml", FACTORY.replace("llama-3.1-8b", "llama-3.1-405b"))
    assert smallest(path, CARD) == ()
    words = ("check", str(path), "--device", "rtx-4090", "--why")
    assert run(lambda: app.main([*words], standalone_mode=False)) == 3
    assert "none of the keys that memfit knows" in capsys.readouterr().out
    assert run(lambda: app.main([*words, "--patch"], standalone_mode=False)) == 3
    assert "no change" in capsys.readouterr().err


def test_python_is_listed_and_not_patched(tmp_path, capsys):
    text = "c = llama3_8b()\nc.training.local_batch_size = 8\nc.training.global_batch_size = 64\n"
    path = write(tmp_path, "plan.py", text + "c.training.seq_len = 8192\n")
    data = {"hardware": {"device": "h100-sxm", "count": 8}}
    (change, *_) = smallest(path, data)
    assert change.keeps == KEEPS[0]
    words = ("check", str(path), "--device", "h100-sxm", "--count", "8", "--patch")
    assert run(lambda: app.main([*words], standalone_mode=False)) == 2
    said = capsys.readouterr().err
    assert "patches are made of YAML and JSON" in said
    assert change.edited[0].key in said


def test_dotted_keys_are_found_nested_and_flat():
    assert find({"a": {"b": 1}}, "a.b") == find({"a.b": 1}, "a.b") == 1
    assert find({"a": 2}, "a.b") is None


def test_a_reference_that_is_computed_first_saves_a_second_model(tmp_path):
    text = "base_model: llama-3.1-8b\nrl: dpo\nbf16: true\ngradient_checkpointing: true\n"
    path = write(tmp_path, "axolotl.yaml", text)
    data = {"hardware": {"device": "h100-sxm"}}
    changes = smallest(path, data)
    assert [(one.key, one.after) for one in changes[0].edited] == [
        ("precompute_ref_log_probs", True)
    ]
    assert api.check([edited(path, changes[0])], data)[1].memory.verdict == "fits"


def test_what_a_launcher_cannot_have_leaves_the_rest_to_be_proposed(tmp_path):
    """FSDP2 cuts no 4-bit base, and its shards on the host know no adapters of TRL's."""
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "num_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true,"
        " fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    launch = write(tmp_path, "accelerate.yaml", text)
    trl = "model_name_or_path: qwen2.5-14b\nmax_length: 4096\nper_device_train_batch_size: 4\n"
    path = write(tmp_path, "trl.yaml", trl + "gradient_accumulation_steps: 4\n")
    data = {"hardware": {"device": "rtx-3090", "count": 4}}
    _, plan = api.check([launch, path], data)
    (change, *_) = api.find_changes([launch, path], data, plan)
    keys = {one.key: one.after for one in change.edited}
    assert keys["use_peft"] is True
    assert "load_in_4bit" not in keys
    _, fits = api.check([launch, edited(path, change)], data)
    assert (fits.memory.verdict, fits.memory.needed) == ("fits", change.needed)


def test_weights_of_16_bits_are_proposed_of_trls_own_default(tmp_path):
    """Which is float32, whether all of them are trained or none."""
    path = write(tmp_path, "trl.yaml", "model_name_or_path: llama-3.1-8b\nmax_length: 1024\n")
    changes = smallest(path, {"hardware": {"device": "h100-sxm"}})
    assert {(one.key, one.after) for change in changes for one in change.edited} == {
        ("dtype", "bfloat16")
    }


def test_divisors_are_found_without_counting_to_them():
    for rows in (1, 2, 97, 360, 1000):
        assert smaller(rows) == [n for n in range(rows - 1, 0, -1) if rows % n == 0]
    assert smaller(10**24)[:2] == [5 * 10**23, 25 * 10**22]


def test_copies_on_many_devices_are_offered_shards_before_another_training(tmp_path):
    """8 B trained whole on eight A100: ZeRO cuts what DDP copies, and the training stays."""
    path = tmp_path / "trl.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 16\nmax_length: 4096\nbf16: true\n"
    )
    data = {"hardware": {"device": "a100-sxm-80", "count": 8}}
    checked, plan = api.check([path], data)
    assert (plan.memory.verdict, checked.undescribed) == ("does_not_fit", ())
    change = api.find_changes([path], data, plan)[0]
    assert change.keeps == KEEPS[0]
    (key,) = change.edited
    assert key.key == "deepspeed"
    path.write_text(path.read_text() + f"deepspeed: {json.dumps(key.after)}\n")
    checked, fits = api.check([path], data)
    assert (fits.memory.verdict, fits.memory.needed) == ("fits", change.needed)
    assert not checked.undescribed
