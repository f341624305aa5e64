"""Any key of a configuration, whatever its value, is understood or refused: never a crash."""

import copy
import json
from pathlib import Path

import pytest

from memfit.check import read_files
from memfit.core.errors import InvalidRequest
from memfit.workflows.load_inputs import put

ADAM = {"learning_rate": 1e-4, "adam_beta1": 0.9, "warmup_steps": 2, "max_grad_norm": 1.0}
HF = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
    "model_name_or_path": "qwen3-0.6b", "optim": "adamw_torch", "max_steps": 3, "seed": 1,
    "packing": True, "lr_scheduler_type": "cosine", "lora_alpha": 16, **ADAM,
}  # fmt: skip
FILES = {
    "axolotl.yaml": {
        "base_model": "qwen3-0.6b", "sequence_len": 512, "sample_packing": True, "bf16": "auto",
        "micro_batch_size": 2, "gradient_accumulation_steps": 4, "adapter": "lora", "lora_r": 8,
        "lora_dropout": 0.1, "lora_target_modules": ["q_proj"], "lora_target_linear": False,
        "gradient_checkpointing": False, "datasets": [{"path": "a", "type": "alpaca"}],
        "optimizer": "adamw_torch", "lr_scheduler": "cosine", "load_in_4bit": False,
        "flash_attention": True, "attn_implementation": "sdpa", "fsdp_version": 1,
        "fsdp": ["full_shard"], "fsdp_config": {"reshard_after_forward": True}, **ADAM,
    },
    "trl.yaml": {
        **HF, "max_length": 512, "use_peft": True, "dtype": "bfloat16", "lora_r": 8,
        "lora_target_modules": ["q_proj"], "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "bfloat16",
        "use_bnb_nested_quant": True, "attn_implementation": "sdpa", "fsdp": "full_shard",
        "gradient_checkpointing": True, "fsdp_config": {"fsdp_version": 1},
    },
    "lf.yaml": {
        **HF, "cutoff_len": 512, "stage": "sft", "finetuning_type": "lora", "lora_rank": 8,
        "lora_target": "all", "pure_bf16": False, "quantization_bit": 4, "flash_attn": "auto",
        "quantization_type": "nf4", "quantization_method": "bnb", "double_quantization": True,
        "disable_gradient_checkpointing": False, "deepspeed": "ds.json",
    },
    "ds.json": {
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"},
        },
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
    },
    "fsdp.yaml": {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8,
        "num_machines": 1, "mixed_precision": "bf16", "fsdp_config": {
            "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": True, "fsdp_offload_params": False,
        },
    },
    "zero.yaml": {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED",
        "num_processes": 8, "num_machines": 1, "deepspeed_config": {
            "zero_stage": 2, "gradient_accumulation_steps": 2, "offload_optimizer_device": "none",
            "deepspeed_config_file": "",
        },
    },
    "titan.toml": {
        "model": {"flavor": "8B"},
        "training": {
            "local_batch_size": 1, "seq_len": 512, "global_batch_size": 8, "steps": 10,
            "dtype": "float32", "max_norm": 1.0,
        },
        "parallelism": {"data_parallel_shard_degree": 8, "tensor_parallel_degree": 1},
        "activation_checkpoint": {"mode": "full"},
        "optimizer": {"lr": 1e-4, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 2, "decay_type": "linear"},
    },
}  # fmt: skip
WRONG = ("x", [1], {"a": 1}, -1, True)


def keys(data, parents=()):
    for key, value in data.items():
        yield (*parents, key)
        if isinstance(value, dict):
            yield from keys(value, (*parents, key))


def replaced(data, path, value):
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def write(path, data):
    if path.suffix != ".toml":
        path.write_text(json.dumps(data))  # YAML, too
        return
    lines = []
    for group, values in data.items():
        if not isinstance(values, dict):
            lines.insert(0, f"{group} = {json.dumps(values)}")
            continue
        lines.append(f"[{group}]")
        for key, value in values.items():
            said = "{a = 1}" if isinstance(value, dict) else json.dumps(value)
            lines.append(f"{key} = {said}")
    path.write_text("\n".join(lines) + "\n")


def read(path):
    data = {"hardware": {"device": "h100-sxm", "count": 8}}
    if path.name in ("ds.json", "fsdp.yaml", "zero.yaml"):
        data["model"] = "qwen3-0.6b"
    return read_files([path], data)


@pytest.mark.parametrize("name", FILES)
def test_wrong_values_are_refused_by_their_key(tmp_path, name):
    write(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}})
    path = tmp_path / name
    write(path, FILES[name])
    read(path)  # as it should be
    refused = 0
    for key in keys(FILES[name]):
        for value in WRONG:
            write(path, replaced(FILES[name], key, value))
            try:
                read(path)
            except InvalidRequest:
                refused += 1
    assert refused > len(FILES[name])


def test_a_number_in_quotes_is_a_number(tmp_path):
    """YAML 1.1 reads 1e-4 as text, so that many configurations say it in quotes."""
    path = tmp_path / "trl.yaml"
    write(path, {**FILES["trl.yaml"], "learning_rate": "1e-4"})
    assert read(path).request.optimizer.learning_rate == 1e-4


def test_the_model_asked_for_stands_in_place_of_the_files(tmp_path):
    path = tmp_path / "trl.yaml"
    write(path, FILES["trl.yaml"])
    asked = {"hardware": {"device": "h100-sxm"}, "model": "llama-3.1-8b"}
    assert read_files([path], asked).request.model == "llama-3.1-8b"


def test_a_file_that_is_named_is_looked_for_upwards(tmp_path, monkeypatch):
    """LLaMA-Factory's examples name DeepSpeed's from the checkout's root."""
    folder = tmp_path / "examples" / "full"
    folder.mkdir(parents=True)
    write(tmp_path / "zero.json", {"zero_optimization": {"stage": 3}})
    write(folder / "lf.yaml", {**FILES["lf.yaml"], "deepspeed": "zero.json"})
    assert read(folder / "lf.yaml").request.parallel.zero == 3
    write(folder / "lf.yaml", {**FILES["lf.yaml"], "deepspeed": "none.json"})
    with pytest.raises(InvalidRequest, match=r"names `none\.json`"):
        read(folder / "lf.yaml")


AXOLOTL = "base_model: qwen3-0.6b\nmicro_batch_size: 1\n"
LAUNCHER = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n"
MISTAKES = {
    "empty": ({"a.yaml": ""}, "`a.yaml` is empty", "axolotl"),
    "broken": (
        {"a.yaml": "base_model: [a\n  b: c\n"}, "`a.yaml` line 2, column 4", "begun in line 1"
    ),
    "in tabs": (
        {"a.yaml": "base_model: a\n\tb: c\n"}, "`a.yaml` line 2, column 1", "spaces indent"
    ),
    "another tool's": ({"a.json": '{"openapi": "3.0"}'}, "of no tool that memfit reads", "TRL"),
    "a package's": ({"a.toml": '[project]\nname = "x"\n'}, "of no tool", "`training`"),
    "memfit's own": ({"a.yaml": "model: gpt2\nmethod: lora\n"}, "of no tool", "memfit predict"),
    "another end": ({"a.txt": AXOLOTL}, "`a.txt` is of no tool", ".yaml, .yml, .json"),
    "two trainers'": (
        {"a.yaml": AXOLOTL, "b.yaml": "model_name_or_path: gpt2\n"},
        "`a.yaml` (axolotl) and `b.yaml` (TRL) each say what is trained", "launcher",
    ),
    "cut off": ({"a.toml": b"\xff\xfe[model]"}, "`a.toml` is not a text file", ""),
    "nested without end": ({"a.yaml": "[" * 9999}, "more than 60 deep", ""),
    "named by itself": (
        {"a.yaml": AXOLOTL + "deepspeed: a.yaml\n"}, "`a.yaml` names itself", "",
    ),
    "no machine": (
        {"a.yaml": AXOLOTL, "b.yaml": LAUNCHER + "num_processes: 8\nnum_machines: 0\n"},
        "`num_machines: 0` in `b.yaml`", "1 or more",
    ),
    "ranks left over": (
        {"a.yaml": AXOLOTL, "b.yaml": LAUNCHER + "num_processes: 7\nnum_machines: 2\n"},
        "7 processes on 2 machines", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_newcomers_mistakes_get_one_clear_error(tmp_path, monkeypatch, name):
    files, message, hint = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    for file, text in files.items():
        Path(file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidRequest) as error:
        read_files([*map(Path, files)], {"hardware": {"device": "h100-sxm"}})
    assert message in str(error.value)
    assert hint in error.value.hint


def test_a_file_is_named_once_and_says_one_configuration(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(AXOLOTL)
    with pytest.raises(InvalidRequest, match="named twice"):
        read_files([path, path], {})
    with pytest.raises(InvalidRequest, match="says one configuration"):
        read_files([path], {}, config="llama3_8b")


@pytest.mark.parametrize(("key", "value"), [
    ("micro_batch", "x"), ("hardware.count", "three"), ("hardware.nodes", [2]), ("parallel", 3),
])  # fmt: skip
def test_what_is_asked_for_is_refused_by_its_key_too(tmp_path, key, value):
    (tmp_path / "a.yaml").write_text(AXOLOTL)
    data = {"hardware": {"device": "h100-sxm"}}
    put(data, key, value)
    with pytest.raises(InvalidRequest, match=f"`{key}: ") as error:
        read_files([tmp_path / "a.yaml"], data)
    assert error.value.hint


@pytest.mark.parametrize(("said", "packing"), [
    ("yes", True), ("on", True), ("no", False), ("off", False), ("true", True), ("FALSE", False),
])  # fmt: skip
def test_yaml_is_read_as_the_tools_read_it(tmp_path, said, packing):
    """PyYAML's version 1.1, in which `yes` is true and 010 is eight."""
    path = tmp_path / "a.yaml"
    path.write_text(f"{AXOLOTL}sample_packing: {said}\nsequence_len: 02000\n1: 2\n")
    found = read_files([path], {"hardware": {"device": "h100-sxm"}})
    assert (found.request.task.packing, found.request.task.sequence_length) == (packing, 1024)
    assert [one.key for one in found.undescribed] == ["1"]


def test_rows_longer_than_the_models_positions_are_said_to_be(tmp_path):
    path = tmp_path / "a.yaml"
    for length, said in ((1024, False), (1025, True)):
        path.write_text(f"model_name_or_path: gpt2\nmax_length: {length}\n")
        assumed = read_files([path], {"hardware": {"device": "h100-sxm"}}).assumed
        assert any("`gpt2` has 1,024 positions" in one for one in assumed) == said


def test_a_key_that_is_nearly_one_that_was_looked_for_is_asked_about(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"{AXOLOTL}laod_in_4bit: true\nsequence_length: 4096\nsome_other: 1\n")
    found = read_files([path], {"hardware": {"device": "h100-sxm"}})
    near = {one.key: one.near for one in found.undescribed}
    assert near == {
        "laod_in_4bit": "load_in_4bit", "sequence_length": "sequence_len", "some_other": "",
    }  # fmt: skip
    path.write_text(f"{AXOLOTL}sequence_length: 4096\nsequence_len: 4096\n")  # not in vain
    found = read_files([path], {"hardware": {"device": "h100-sxm"}})
    assert not any(one.near for one in found.undescribed)
