"""Keys whose value asks for nothing, and those that are another word for what is described."""

import json

import pytest

from memfit.check import read_files
from memfit.check.keys import asks_nothing
from undescribed import assert_named

SFT = "model_name_or_path: Qwen/Qwen3-0.6B\n"
AXOLOTL = "base_model: Qwen/Qwen3-0.6B\n"


def read(folder, text, name="tool.yaml", model=None):
    file = folder / name
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    data = {"hardware": {"device": "h100-sxm", "count": 8}}
    return read_files([file], data | ({"model": model} if model else {}))


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("torch_autocast", {"enabled": False}, {"enabled": True, "dtype": "torch.bfloat16"}),
        ("autotuning", {"enabled": False, "fast": True}, {"fast": True}),
        ("progressive_layer_drop", {"enabled": False, "theta": 0.5}, {"enabled": "LATER"}),
        ("compile", {"deepcompile": False}, {"deepcompile": True}),
        ("compile", {"disable": True}, {"disable": False, "backend": "inductor"}),
        ("sequence_parallel_size", 1, 2),
        ("tensor_parallel", {"autotp_size": 1}, {"autotp_size": 2}),
        (
            "compression_training",
            {
                "layer_reduction": {"enabled": False, "keep_number_layer": 5},
                "head_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {}},
            },
            {
                "layer_reduction": {"enabled": False},
                "head_pruning": {"shared_parameters": {"enabled": True}},
            },
        ),
    ],
)
def test_a_section_that_is_switched_off_is_understood(key, off, on, tmp_path):
    zero = {"zero_optimization": {"stage": 2}}
    assert not read(tmp_path, zero | {key: off}, "ds.json", "qwen3-0.6b").undescribed
    assert_named(f"`{key}: ", lambda: read(tmp_path, zero | {key: on}, "ds.json", "qwen3-0.6b"))


def test_a_section_of_no_switches_is_not_taken_to_be_off():
    assert asks_nothing({})
    assert not asks_nothing({"different_groups": {"one": {"params": {"start_bits": 8}}}})


@pytest.mark.parametrize(
    ("said", "precision", "base"),
    [
        ("bfloat16: true", "bf16-mixed", "bf16"),
        ("bf16: full", "bf16", "bf16"),
        ("fp16: true\nfloat16: true", "fp16-mixed", "fp16"),
        ("bf16: true\nfp16: true\nfloat16: false", "bf16-mixed", "bf16"),
    ],
)
def test_axolotls_words_for_dtypes(said, precision, base, tmp_path):
    found = read(tmp_path, f"{AXOLOTL}adapter: lora\nlora_target_linear: true\n{said}\n").request
    assert (found.precision, found.base_format) == (precision, base)


def test_axolotls_fp16_without_autocast_is_refused_by_its_key(tmp_path):
    assert_named("`float16: true`", lambda: read(tmp_path, f"{AXOLOTL}float16: true\n"))


@pytest.mark.parametrize(
    "text",
    [
        SFT + "use_peft: true\nuse_rslora: true\n",
        SFT + "finetuning_type: lora\nuse_rslora: true\n",
        AXOLOTL + "adapter: lora\nlora_target_linear: true\npeft_use_rslora: true\n",
    ],
)
def test_rank_stabilised_adapters(text, tmp_path):
    assert read(tmp_path, text).request.lora.scaling == "rank-stabilised"


def test_rows_without_padding_are_taken_to_be_full(tmp_path):
    assert any(
        "rows are full" in said for said in read(tmp_path, f"{SFT}padding_free: true\n").assumed
    )
    pairs = f"{SFT}precompute_ref_log_probs: true\nloss_type: sigmoid\npadding_free: true\n"
    assert_named("`padding_free: true`", lambda: read(tmp_path, pairs))
