"""Which of torch's checkpoints recompute: what tools take where a file is silent, and refuse."""

from functools import partial

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from memfit.check import read_files
from undescribed import assert_named

SFT = "model_name_or_path: Qwen/Qwen3-0.6B\n"
AXOLOTL = "base_model: Qwen/Qwen3-0.6B\ngradient_checkpointing: true\n"
FACTORY = SFT + "finetuning_type: lora\n"
KEY = "gradient_checkpointing_kwargs"
PEFT = SFT + "use_peft: true\n"


def fsdp(version):
    units = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    config = f"{units}, fsdp_version: {version}, fsdp_activation_checkpointing: "
    return (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
        f"fsdp_config: {{{config}{str(version == 1).lower()}}}\n"
    )


def zero(stage):
    return f'{{"zero_optimization": {{"stage": {stage}}}, "bf16": {{"enabled": true}}}}'


def options(folder, text, launch="", **more):
    return read(folder, text, launch, **more).request.options


def read(folder, text, launch="", **more):
    files = [folder / "tool.yaml"]
    files[0].write_text(text)
    if launch:
        files.append(folder / ("ds.json" if launch.startswith("{") else "launch.yaml"))
        files[1].write_text(launch)
    data = {"hardware": {"device": "h100-sxm", "count": 8}, **more}
    return read_files(files, data)


@pytest.mark.parametrize(
    ("text", "launch", "reenters"),
    [
        (SFT, "", False),
        (SFT + KEY + ": {use_reentrant: true}\n", "", True),
        (SFT + "activation_checkpointing_kwargs: {use_reentrant: true}\n", "", True),
        (SFT + KEY + ": {preserve_rng_state: false}\n", "", True),  # then torch chooses
        (SFT + KEY + ": {every_n_layers: 1}\n", "", False),  # and here transformers does
        (PEFT, zero(3), True),
        (PEFT, zero(2), False),
        (SFT, zero(3), False),
        (AXOLOTL, "", True),
        (AXOLOTL + KEY + ": {use_reentrant: false}\n", "", False),
        (AXOLOTL + KEY + ": {}\n", "", False),
        (AXOLOTL + "rl: dpo\n", "", False),
        (FACTORY, "", True),
        (FACTORY + "use_reentrant_gc: false\n", "", False),
        (FACTORY, fsdp(2), False),
        (FACTORY, zero(3), True),
        (FACTORY + "disable_gradient_checkpointing: true\n", fsdp(1), False),
    ],
)
def test_whether_blocks_are_reentrant(text, launch, reenters, tmp_path):
    assert options(tmp_path, text, launch).get("reentrant", False) is reenters


def test_what_else_is_said_of_checkpoints_is_refused_by_its_name(tmp_path):
    for said in ("every_n_layers: 2", "offload: true", "selective: true", "early_stop: false"):
        assert_named(rf"`{KEY}.{said}`", partial(read, tmp_path, f"{SFT}{KEY}: {{{said}}}\n"))


def test_memfits_own_step_has_one_kind(tmp_path):
    assert not options(tmp_path, AXOLOTL, framework="memfit")


def test_transformers_own_default_is_not_reentrant():
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=1))
    model.activation_checkpointing_enable()
    asked = model.model.layers[0]._gradient_checkpointing_func.keywords
    assert asked == {"use_reentrant": False}
