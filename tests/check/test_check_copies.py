"""Trained copies of modules beside adapters: read by `check` as exports write them."""

import pytest

from memfit import api
from memfit.check import read_files
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.request import Request
from undescribed import assert_named

BOTH = "embed_tokens,lm_head"
TRL = "model_name_or_path: qwen3-0.6b\nuse_peft: true\n"
AXOLOTL = "base_model: qwen3-0.6b\nadapter: lora\nbf16: true\n"
FACTORY = "model_name_or_path: qwen3-0.6b\nfinetuning_type: lora\nbf16: true\n"
NAMED = "lora_modules_to_save: [embed_tokens, lm_head]\n"
ZERO = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
LAUNCH = "deepspeed: ds.json\n"


def read(folder, text, **more):
    return read_file(folder, text, **more).request


def read_file(folder, text, **more):
    file = folder / "tool.yaml"
    file.write_text(text)
    (folder / "ds.json").write_text(ZERO)
    text = text.replace(LAUNCH, f"deepspeed: {folder / 'ds.json'}\n")
    file.write_text(text)
    return read_files([file], {"hardware": {"device": "h100-sxm"}, **more})


@pytest.mark.parametrize(
    ("text", "saved", "dtype"),
    [
        (TRL + NAMED, BOTH, None),
        (TRL.replace("true", "false") + NAMED, None, None),  # no adapter, and nothing to copy
        (AXOLOTL + NAMED, BOTH, None),
        (AXOLOTL, None, None),
        (FACTORY + "additional_target: embed_tokens, lm_head\n", BOTH, "fp32"),
        (FACTORY + "additional_target: lm_head\npure_bf16: true\n", "lm_head", None),
        (FACTORY + f"additional_target: lm_head\n{LAUNCH}", "lm_head", None),
    ],
)
def test_each_tools_own_key_is_read(text, saved, dtype, tmp_path):
    options = read(tmp_path, text).options
    assert (options.get("modules_to_save"), options.get("copies_dtype")) == (saved, dtype)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (TRL + "lora_modules_to_save: {a: 1}\n", {}, "`lora_modules_to_save` in .* are names"),
        (AXOLOTL + NAMED, {"framework": "memfit"}, "`lora_modules_to_save: .*memfit's own step"),
        (
            AXOLOTL + NAMED + "peft_ensure_weight_tying: true\n", {},
            "`peft_ensure_weight_tying: true` in",
        ),
    ],
)  # fmt: skip
def test_what_no_step_has_is_refused_by_its_key(text, more, message, tmp_path):
    assert_named(message, lambda: read_file(tmp_path, text, **more))


@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory"])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_what_is_written_is_read_back_with_the_peak_that_was_claimed(target, base, tmp_path):
    asked = {
        "framework": "trl" if target == "trl" else "hf-trainer", "model": "qwen3-0.6b",
        "task": {"sequence_length": 512, "global_batch": 1, "packing": False}, "micro_batch": 1,
        "hardware": {"device": "h100-sxm"}, "precision": "bf16-mixed", "base_format": base,
        "method": "lora", "lora": {"rank": 8, "targets": ["q_proj"]}, "recompute": "full",
        "options": {"prepare_kbit": False, "double_quantisation": base == "nf4"},
    }  # fmt: skip
    without = api.predict(from_data(asked, Request, source="request")).memory.peak_allocated
    asked["options"]["modules_to_save"] = BOTH
    plan = api.predict(from_data(asked, Request, source="request"))
    made = api.export(plan, target)
    wide = target == "llamafactory"
    assert ("options.copies_dtype" in made.changed) is wide
    found = read(tmp_path, api.write_export(made, tmp_path)[0].read_text())
    assert found.options["modules_to_save"] == BOTH
    again = predict_request(found).memory
    assert again.peak_allocated == made.peak.peak_allocated
    # copies of both, tied no more, and two moments of each, in the dtype of the copies
    each = 2 * 151936 * 1024 * (4 if wide else 2)
    assert again.peak_allocated - without >= 3 * each
