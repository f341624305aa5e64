"""Words of other trainers are answered with keys and values that a request takes."""

import pytest

from memfit.core.errors import InvalidRequest, UnknownName
from memfit.files.request_file import KEYS
from memfit.optimizers import optimizers
from memfit.plan.frameworks import find_framework
from memfit.records import from_data
from memfit.records.other_words import ELSEWHERE, WORDS, describe_value, describe_word
from memfit.records.request import Request, put

VALUES = {  # a value as its trainer writes it; `true` where the word is a switch
    "model": "gpt2", "task.data": "train.jsonl", "task.evaluation": "held_out.jsonl",
    "hardware.device": "h100-sxm", "limits.memory": "40 GiB", "limits.cost": "$500",
    "limits.time": "2 hours", "hardware.price": "spot", "task.packing": True,
    "quantisation.double": True, "lora.dropout": 0.05, "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95, "optimizer.eps": 1e-8, "optimizer.warmup_ratio": 0.03,
    "regularisation.label_smoothing": 0.1,
    "optimizer.floor": 0.1, "optimizer.learning_rate": 2e-5,
    "rollout.top_p": 0.9, "rollout.min_p": 0.1, "rollout.stop_words": ["the end"],
}  # fmt: skip
OWN = {
    **dict.fromkeys(("chat_template", "chat_template_path", "chat_template_jinja"), "own.jinja"),
    "bnb_4bit_quant_type": "nf4", "mixed_precision": "bf16", "torch_dtype": "torch.bfloat16",
    "dtype": "float32", "attn_implementation": "flash_attention_2", "optim": "adamw_torch_fused",
    "lr_scheduler_type": "cosine", "lr_scheduler": "constant_with_warmup", "adapter": "qlora",
    "finetuning_type": "full", "peft_type": "LORA", "stage": "pt", "rl": "dpo",
    "trainer_type": "sft", "objective": "sft", "lora_target_modules": "q_proj, v_proj",
    "lora_target": "all", "target_modules": ["q_proj"],
    "targets": "all", "lora_targets": "all", "backend": "trl", "engine": "trl",
    "deepspeed": "ds_z3_config.json",
    "fsdp": "full_shard auto_wrap", "sharding_strategy": "SHARD_GRAD_OP", "bits": 8,
    "quantization_bit": 4, "mask_truncated_completions": True, "use_bias_correction_kl": True,
    "scale_rewards": "batch", "importance_sampling_level": "sequence",
    "reward_funcs": ["number"], "gamma": 0.9, "lam": 0.9, "whiten_rewards": True,
}  # fmt: skip


def value_of(word):
    if word in OWN:
        return OWN[word]
    keys = WORDS[word](4).changes
    (key,) = keys if len(keys) == 1 else [""]
    return VALUES.get(key, 4 if 4 in keys.values() else True)


def read(changes):
    data = {"model": "gpt2"}
    for key, value in changes.items():
        put(data, key, value)
    return from_data(data, Request, source="here")


def test_an_answer_is_a_request_that_can_be_read():
    for word in WORDS:
        answer = WORDS[word](value_of(word))
        assert answer.changes or answer.note, word
        assert set(answer.changes) <= set(KEYS), word
        assert read(answer.changes), word
        assert describe_word(word, value_of(word)), word
        if "optimizer.name" in answer.changes:
            assert optimizers.find(answer.changes["optimizer.name"]), word


def test_a_switch_that_is_off_is_answered_too():
    without = [word for word in WORDS if not (off := WORDS[word](False)).changes and not off.note]
    assert WORDS
    assert not without


@pytest.mark.parametrize(
    ("word", "value", "hint"),
    [
        ("load_in_4bit", True, "`base_format: nf4` (with `method: lora`)"),
        ("load_in_8bit", True, "`base_format: int8` (with `method: lora`)"),
        ("gradient_checkpointing", True, "`recompute: full`"),
        ("gradient_checkpointing", False, "`recompute: none`"),
        ("per_device_train_batch_size", 2, "`micro_batch: 2`"),
        ("gradient_accumulation_steps", 8, "micro-batch x 8 x devices"),
        ("max_seq_length", 2048, "`task.sequence_length: 2048`"),
        ("max_length", 2048, "`task.sequence_length: 2048`"),
        ("num_train_epochs", 3, "`task.epochs: 3`"), ("num_epochs", 3, "`task.epochs: 3`"),
        ("learning_rate", 2e-4, "`optimizer.learning_rate: 0.0002`"),
        ("deepspeed", "zero3", "`parallel: {dp_shard: 8, zero: 3}`"),
        ("deepspeed", "configs/ds_z2_config.json", "zero: 2"), ("zero3", True, "zero: 3"),
        ("fsdp", "full_shard", "`parallel: {dp_shard: 8}`"),
        ("bf16", True, "`precision: bf16-mixed`"), ("fp16", True, "`precision: fp16-mixed`"),
        ("bf16", False, "leave it out"), ("lora_r", 64, "`lora.rank: 64`"),
        ("lora_alpha", 16, "`lora.alpha: 16`"), ("use_peft", True, "`method: lora`"),
        ("lora_target_modules", "all-linear", "`lora.targets: all-linear`"),
        ("packing", True, "`task.packing: true`"), ("sample_packing", True, "`task.packing"),
        ("optim", "paged_adamw_8bit", "`optimizer.name: adamw8bit-paged`"),
        ("flash_attention", True, "`attention: flash`"), ("adapter", "qlora", "base_format: nf4"),
        ("output_dir", "out", "`--folder"), ("logging_steps", 10, "leave it out"),
        ("Load-In-4bit", True, "`base_format: nf4`"),
    ],
)  # fmt: skip
def test_words_that_people_bring(word, value, hint):
    with pytest.raises(InvalidRequest, match="unknown key") as caught:
        from_data({"model": "gpt2", word: value}, Request, source="here")
    assert hint in caught.value.hint
    assert "did you mean" not in caught.value.hint


def test_a_key_that_nobody_uses_is_answered_with_the_nearest():
    with pytest.raises(InvalidRequest) as caught:
        from_data({"model": "gpt2", "recomputee": "full"}, Request, source="here")
    assert caught.value.hint == "did you mean `recompute`?"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("task.sequence_length", "8k", 8192), ("task.sequence_length", "1.5K", 1536),
        ("task.sequence_length", "4096 tokens", 4096), ("task.tokens", "50M", 50_000_000),
        ("task.tokens", "1.4b", 1_400_000_000), ("task.steps", "2k", 2000),
        ("task.global_batch", "1,024", 1024), ("micro_batch", "4", 4), ("hardware.count", "8", 8),
    ],
)  # fmt: skip
def test_a_count_may_be_written_short(key, text, value):
    made = read({key: text})
    for name in key.split("."):
        made = getattr(made, name)
    assert made == value


@pytest.mark.parametrize("text", ["many", "8 k tons", "0.3", "1,5", "8q"])
def test_a_count_that_is_none_is_refused_as_it_stands(text):
    with pytest.raises(InvalidRequest, match=f"`task.tokens: {text}` in here"):
        read({"task.tokens": text})


def test_qlora_is_lora_over_a_base_in_four_bits():
    made = read({"method": "QLoRA"})
    assert (made.method, made.base_format) == ("lora", "nf4")
    assert read({"method": "qlora", "base_format": "fp4"}).base_format == "fp4"
    with pytest.raises(InvalidRequest, match=r"`base_format: int8` is stated") as caught:
        read({"method": "qlora", "base_format": "int8"})
    assert caught.value.hint


def test_a_value_of_another_key_is_answered_with_a_request_that_can_be_read():
    for key, words in ELSEWHERE.items():
        for word, answer in words.items():
            assert answer.changes or answer.note, (key, word)
            assert read(answer.changes), (key, word)
            if "framework" in answer.changes:
                assert find_framework(answer.changes["framework"]), word


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("method", "GRPO", "that is `task.objective: grpo` here"),
        ("method", "online-dpo", "that is `task.objective: online_dpo` here"),
        ("precision", "4bit", "that is `base_format: nf4` (with `method: lora`) here"),
        ("precision", 8, "that is `base_format: int8` (with `method: lora`) here"),
        ("precision", "bfloat16", "that is `precision: bf16` here"),
    ],
)
def test_a_value_of_another_key_is_answered(key, value, hint):
    with pytest.raises(InvalidRequest) as refused:
        read({key: value})
    assert refused.value.hint == hint
    assert not describe_value(key, "cheese")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("axolotl", "`framework: hf-trainer`"), ("nemo", "`framework: megatron`"),
     ("unsloth", "no step of its kernels")],
)  # fmt: skip
def test_a_trainer_that_has_its_step_of_another_is_answered(name, hint):
    with pytest.raises(UnknownName) as refused:
        find_framework(name)
    assert hint in refused.value.hint
