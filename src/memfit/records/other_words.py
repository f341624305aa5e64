"""What other trainers call a setting, and how it is written here.

The words of TRL and transformers, axolotl, LLaMA-Factory, Unsloth, DeepSpeed and Megatron-LM. Each
row answers a word and its value with keys and values of the request, and a note where these do not
say all of it. `tests/records/test_other_words.py` reads a request with every answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from memfit.core.wording import as_yaml


class Answer(NamedTuple):
    """Keys of the request with their values; none where nothing here depends on the word."""

    changes: dict[str, Any]
    note: str = ""


Word = Callable[[Any], Answer]
TASKS = (  # of `task.objective`
    "pretrain", "sft", "dpo", "simpo", "orpo", "cpo", "kto", "reward", "grpo", "rloo",
    "ppo", "online_dpo",
)  # fmt: skip
NF4 = {"base_format": "nf4", "method": "lora"}
INT8 = {"base_format": "int8", "method": "lora"}
SCHEDULES = {
    "constant_with_warmup": "constant", "inverse_sqrt": "inverse-sqrt",
    "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
OPTIMIZERS = {
    "adamw": "adamw", "adam": "adamw", "adamw_torch": "adamw", "adamw_hf": "adamw",
    "adamw_torch_fused": "adamw", "adamw_apex_fused": "adamw", "paged_adamw_32bit": "adamw",
    "paged_adamw": "adamw", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit-bnb",
    "paged_adamw_8bit": "adamw8bit-paged", "adamw_torch_8bit": "adamw8bit",
    "adamw_torch_4bit": "adamw4bit", "adafactor": "adafactor", "sgd": "sgd", "muon": "muon",
}  # fmt: skip
KERNELS = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attn": "flash",
    "fa2": "flash", "sdpa": "flash", "eager": "math", "xformers": "efficient",
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}


def _key(key: str, note: str = "") -> Word:
    """The same value under another key."""
    return lambda value: Answer({key: value}, note)


def _money(key: str) -> Word:
    """An amount, which is of dollars where it has no unit."""
    return lambda value: Answer({key: f"{value} USD" if type(value) in (int, float) else value})


def _switch(on: dict[str, Any], off: dict[str, Any] | None = None, note: str = "") -> Word:
    """Changes of a word that is true, and of one that is false."""
    without = Answer(off) if off else Answer({}, "leave it out: nothing else is assumed here")
    return lambda value: without if _is_off(value) else Answer(on, note)


def _is_off(value: Any) -> bool:
    return value in (False, None, 0, "") or str(value).lower() in ("false", "no", "none", "off")


def _choice(key: str, known: dict[str, str], note: str = "") -> Word:
    """A value by another name, under another key."""

    def answer(value: Any) -> Answer:
        text = str(value).rpartition(".")[2].lower()
        return Answer({key: known.get(text, text)}, note)

    return answer


def _bits(value: Any) -> Answer:
    if str(value) in ("4", "8"):
        return Answer(NF4 if str(value) == "4" else INT8)
    return Answer({}, "`base_format` is int8, nf4 or fp4 of a quantised base")


def _coding(value: Any) -> Answer:
    text = str(value).lower().removeprefix("bnb-")
    return ELSEWHERE["precision"].get(text) or _bits(value)


def _zero(value: Any) -> Answer:
    """A stage of ZeRO, as it stands in `zero3`, `ds_z2_config.json` or `stage: 1`."""
    if _is_off(value):
        return Answer({}, "leave it out: `parallel: {dp_replicate: N}` are plain copies")
    found = re.search(r"(?:z|zero|stage)[_-]?([123])|^([123])$", str(value).lower())
    stage = int(found[1] or found[2]) if found else 3
    return Answer(
        {"framework": "deepspeed", "parallel": {"dp_shard": 8, "zero": stage}},
        "8 stands for your number of devices; memfit's own step shards with"
        " `parallel: {dp_shard: 8}` alone",
    )


def _fsdp(value: Any) -> Answer:
    if _is_off(value):
        return Answer({}, "leave it out: nothing is sharded unless it is asked for")
    parallel: dict[str, Any] = {"dp_shard": 8}
    if "grad_op" in str(value).lower() or "shard_grad" in str(value).lower():
        parallel["reshard_after_forward"] = False
    return Answer({"parallel": parallel}, "8 stands for your number of devices")


def _adapter(value: Any) -> Answer:
    text = str(value).lower()
    known = {"qlora": NF4, "lora": {"method": "lora"}, "dora": {"method": "dora"},
             "freeze": {"method": "freeze"}, "oft": None}  # fmt: skip
    return Answer(known.get(text) or {"method": "full" if _is_off(value) else text})


def _stage(value: Any) -> Answer:
    text = str(value).lower()
    return Answer({"task.objective": {"pt": "pretrain"}.get(text, text)})


def _targets(value: Any) -> Answer:
    if str(value).lower() in ("all", "all-linear"):
        return Answer({"lora.targets": "all-linear"})
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    return Answer({"lora.targets": value})


def _nothing(what: str) -> Word:
    """Return a word that memory and time do not depend on, or that another key states."""
    return lambda _: Answer({}, what)


def _batch(value: Any) -> Answer:
    return Answer(
        {},
        "`task.global_batch` counts all rows of an optimizer step: those of a micro-batch x"
        f" {value} x devices",
    )


def _times(value: Any) -> Answer:
    share = 0.0 if _is_off(value) else round(1 / float(value), 4)
    if not 0 < share < 1:
        return Answer({}, "`run.save_every` and `run.evaluate_every` are steps, or shares of a run")
    return Answer(
        {"run.save_every": share, "run.evaluate_every": share}, "a share is of the whole run"
    )


def _share(value: Any) -> Answer:
    if _is_off(value):
        return Answer({}, "leave it out: nothing is held out unless it is stated")
    if isinstance(value, int | float) and value < 1:
        return Answer({"task.evaluation_share": value})
    return Answer({"task.evaluation_share": 0.05}, "a share of the documents, not their number")


def _metric(value: Any) -> Answer:
    name = str(value).removeprefix("eval_")
    return Answer({"run.best_by": "loss" if _is_off(value) else name})


def _trackers(value: Any) -> Answer:
    names = [value] if isinstance(value, str) else value
    if _is_off(value) or names == ["none"]:
        return Answer({}, "leave it out: no tracker is used unless it is stated")
    if names == ["all"] or not isinstance(names, list):
        return Answer({}, "`run.trackers` is a list, such as `[tensorboard, wandb]`")
    return Answer({"run.trackers": names})


def _patience(value: Any) -> Answer:
    return Answer({"run.patience": 0 if _is_off(value) else value, "run.best_by": "loss"})


def _compile(value: Any) -> Answer:
    return Answer({"compile": "none" if _is_off(value) else "blocks"})


_RECOMPUTE = _switch({"recompute": "full"}, {"recompute": "none"})
_LENGTH, _ROWS = _key("task.sequence_length"), _key("micro_batch")
_UNSEEN = _nothing("leave it out: neither memory nor time of a step depends on it here")
_FOLDER = _nothing("the folder is an option: `--folder runs/first`")
_MIXTURE = _nothing("shares stand beside the data: `task.data: data/code=0.7, data/chat.jsonl=0.3`")
_RESUME = _nothing(
    "the same command resumes by itself; `memfit train … --continue` goes on beyond the end, with"
    " more `task.steps` or another schedule"
)
_RANKS = "it is on each of `hardware.nodes`"

WORDS: dict[str, Word] = {
    # what is trained
    **dict.fromkeys(
        ("model_name_or_path", "base_model", "model_name", "model_id", "pretrained_model"),
        _key("model"),
    ),
    "load_in_4bit": _switch(NF4), "load_in_8bit": _switch(INT8), "quantization_bit": _bits,
    "bits": _bits, **dict.fromkeys(("quantization", "quantize", "quant"), _coding),
    "bnb_4bit_quant_type": _choice("base_format", {}, "with `method: lora`"),
    "bnb_4bit_use_double_quant": _key("quantisation.double"),
    "double_quantization": _key("quantisation.double"),
    "qlora": _switch(NF4), "lora": _switch({"method": "lora"}), "dora": _switch({"method": "dora"}),
    "use_peft": _switch({"method": "lora"}, {"method": "full"}),
    "use_lora": _switch({"method": "lora"}, {"method": "full"}),
    "peft": _switch({"method": "lora"}),
    **dict.fromkeys(
        ("full_finetuning", "full_finetune", "full_fine_tuning", "full_ft", "full_param"),
        _switch({"method": "full"}),
    ),
    "freeze": lambda value: Answer(
        {"method": "freeze", "freeze.last_blocks": value if type(value) is int and value else 2},
        "as many of the last blocks as you train"),
    **dict.fromkeys(("4bit", "nf4"), _switch(NF4)),
    **dict.fromkeys(("8bit", "int8"), _switch(INT8)),
    "use_dora": _switch({"method": "dora"}), "peft_use_dora": _switch({"method": "dora"}),
    "rslora": _switch({"lora.scaling": "rank-stabilised"}),
    "use_rslora": _switch({"lora.scaling": "rank-stabilised"}),
    "peft_use_rslora": _switch({"lora.scaling": "rank-stabilised"}),
    "adapter": _adapter, "finetuning_type": _adapter, "peft_type": _adapter,
    "r": _key("lora.rank"), "lora_r": _key("lora.rank"), "lora_rank": _key("lora.rank"),
    "lora_alpha": _key("lora.alpha"), "lora_dropout": _key("lora.dropout"),
    **dict.fromkeys(
        ("targets", "lora_targets", "lora_target_modules", "target_modules", "lora_target"),
        _targets,
    ),
    "lora_target_linear": _switch({"lora.targets": "all-linear"}),
    "freeze_trainable_layers": _key("freeze.last_blocks", "with `method: freeze`"),
    # on what, and for how long
    "stage": _stage, "rl": _stage, "trainer_type": _stage,
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_name", "train_file", "train_data", "dataset_path"),
        _key("task.data"),
    ),
    "val_size": _share, "val_set_size": _share,
    "eval_dataset": _key("task.evaluation"), "validation_file": _key("task.evaluation"),
    **dict.fromkeys(
        ("seq_len", "seqlen", "max_seq_len", "max_seq_length", "max_length", "sequence_len",
         "cutoff_len", "block_size", "model_max_length", "context_length", "seq_length",
         "sequence_length", "n_ctx", "context", "ctx", "ctx_len"),
        _LENGTH,
    ),
    **dict.fromkeys(
        ("chat_template", "chat_template_path", "chat_template_jinja"),
        _key("task.chat_template", "a file in Jinja, or its text; unset, the tokenizer's own"),
    ),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt"),
        _switch({"task.learns": "all", "task.objective": "sft"}),
    ),
    "mask_history": _switch({"task.learns": "last-answer", "task.objective": "sft"}),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"), _switch({"task.objective": "sft"}),
    ),
    "packing": _key("task.packing"), "sample_packing": _key("task.packing"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "epochs", "n_epochs"), _key("task.epochs")),
    "max_steps": _key("task.steps"), "steps": _key("task.steps"),
    "train_iters": _key("task.steps"), 
    **dict.fromkeys(("tokens", "num_tokens", "total_tokens", "train_tokens"), _key("task.tokens")),
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "per_device_train_batch_size", "batch",
         "train_micro_batch_size_per_gpu", "per_device_batch_size", "bs", "bsz", "mbs"),
        _ROWS,
    ),
    **dict.fromkeys(
        ("global_batch", "global_batch_size", "train_batch_size", "total_batch_size", "gbs"),
        _key("task.global_batch"),
    ),
    "gradient_accumulation_steps": _batch, "grad_accum": _batch, "gradient_accumulation": _batch,
    "ga": _batch,
    "beta": _key("preference.beta"), "dpo_beta": _key("preference.beta"),
    "pref_beta": _key("preference.beta"), "objective": _stage,
    # sampled answers, in TRL's words
    **{name: _key(f"rollout.{name}") for name in
       ("num_generations", "max_prompt_length", "max_completion_length", "temperature", "top_k",
        "top_p", "min_p", "repetition_penalty")},
    **dict.fromkeys(("stop_strings", "stop", "stop_sequences"), _key("rollout.stop_words")),
    **{name: _key(f"policy.{name}") for name in
       ("epsilon", "epsilon_high", "delta", "num_iterations", "scale_rewards",
        "importance_sampling_level", "mask_truncated_completions", "use_bias_correction_kl")},
    **{name: _key(f"ppo.{name}") for name in
       ("num_ppo_epochs", "kl_coef", "cliprange", "cliprange_value", "vf_coef", "gamma", "lam",
        "whiten_rewards")},
    "missing_eos_penalty": _key("reward.missing_eos_penalty"),
    "reward_funcs": _key("reward.funcs"),
    # how a step computes
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing",
         "recompute_activations", "checkpoint_activations", "checkpointing", "grad_checkpointing"),
        _RECOMPUTE,
    ),
    "bf16": _switch({"precision": "bf16-mixed"}), "fp16": _switch({"precision": "fp16-mixed"}),
    "fp8": _switch({"precision": "fp8-mixed"}), "pure_bf16": _switch({"precision": "bf16"}),
    "mixed_precision": _choice(
        "precision", {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-mixed",
                      "no": "fp32", "none": "fp32"},
    ),
    "torch_dtype": _choice("precision", DTYPES, "`bf16-mixed` keeps trained weights in fp32"),
    "dtype": _choice("precision", DTYPES, "`bf16-mixed` keeps trained weights in fp32"),
    "tf32": _UNSEEN,
    **dict.fromkeys(
        ("flash_attention", "flash_attn", "use_flash_attention_2", "use_flash_attn", "fa2"),
        _switch({"attention": "flash"}),
    ),
    "attn_implementation": _choice("attention", KERNELS),
    "sdp_attention": _switch({"attention": "flash"}),
    "xformers_attention": _switch({"attention": "efficient"}),
    "torch_compile": _compile, "compile_model": _compile,
    **dict.fromkeys(
        ("enable_liger_kernel", "liger_kernel", "liger", "use_liger"),
        _switch({"lean": "all", "loss": "chunked"}),
    ),
    "use_liger_kernel": _switch({"lean": "all", "loss": "chunked"},
                                note="or `options: {use_liger_kernel: true}` of `framework: trl`"),
    # the optimizer
    "optim": _choice("optimizer.name", OPTIMIZERS),
    "learning_rate": _key("optimizer.learning_rate"),
    "lr": _key("optimizer.learning_rate"), "weight_decay": _key("optimizer.weight_decay"),
    **dict.fromkeys(
        ("loraplus_lr_ratio", "loraplus_ratio", "lora_plus_lr_ratio"),
        lambda value: Answer(
            {"optimizer.lora_plus": 0 if _is_off(value) else value, "method": "lora"}),
    ),
    "neftune_noise_alpha": _key("regularisation.neftune_alpha"),
    "label_smoothing_factor": _key("regularisation.label_smoothing"),
    "z_loss": _key("regularisation.z_loss"), "z_loss_weight": _key("regularisation.z_loss"),
    "warmup_steps": _key("optimizer.warmup_steps"),
    "warmup_ratio": _key("optimizer.warmup_ratio"),
    "lr_scheduler_type": _choice("optimizer.schedule", SCHEDULES),
    "lr_scheduler": _choice("optimizer.schedule", SCHEDULES),
    "min_lr_rate": _key("optimizer.floor"), "min_lr_ratio": _key("optimizer.floor"),
    "cosine_min_lr_ratio": _key("optimizer.floor"),
    "max_grad_norm": _key("optimizer.clip_norm"), "gradient_clipping": _key("optimizer.clip_norm"),
    "clip_grad": _key("optimizer.clip_norm"), "adam_beta1": _key("optimizer.beta1"),
    "adam_beta2": _key("optimizer.beta2"), "adam_epsilon": _key("optimizer.eps"),
    "cpu_offload": _switch({"offload": "optimizer"}), "offload_optimizer": _switch(
        {"offload": "optimizer"}),
    # the devices
    "deepspeed": _zero, "zero": _zero, "zero_stage": _zero, "zero_optimization": _zero,
    "zero1": lambda v: _zero(v if _is_off(v) else 1),
    "zero2": lambda v: _zero(v if _is_off(v) else 2),
    "zero3": lambda v: _zero(v if _is_off(v) else 3),
    "fsdp": _fsdp, "fsdp_config": _fsdp, "fsdp2": _fsdp, "sharding_strategy": _fsdp,
    "ddp": _switch({"parallel": {"dp_replicate": 8}}, note="8 stands for your number of devices"),
    **dict.fromkeys(
        ("device", "gpu", "gpu_type", "gpu_name", "card", "accelerator", "hardware"),
        _key("hardware.device"),
    ),
    **dict.fromkeys(
        ("gpus", "num_gpus", "n_gpus", "num_processes", "nproc_per_node", "world_size", "count",
         "ngpus", "ngpu", "gpu_count", "num_devices", "devices"),
        _key("hardware.count", _RANKS),
    ),
    "nodes": _key("hardware.nodes"), "num_nodes": _key("hardware.nodes"),
    "nnodes": _key("hardware.nodes"), "num_machines": _key("hardware.nodes"),
    "hosts": _key("hardware.nodes"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tp",
         "tensor_parallel_degree"),
        _key("parallel.tp"),
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size", "pp",
         "pipeline_parallel_degree"),
        _key("parallel.pp"),
    ),
    "context_parallel_size": _key("parallel.cp"), "cp": _key("parallel.cp"),
    "context_parallel_degree": _key("parallel.cp"),
    **dict.fromkeys(("expert_parallel_size", "ep"), _key("parallel.ep")),
    "memory": _key("limits.memory"), "vram": _key("limits.memory"),
    "gpu_memory": _key("limits.memory"), "max_memory": _key("limits.memory"),
    **dict.fromkeys(("budget", "cost", "max_cost", "max_price"), _money("limits.cost")),
    **dict.fromkeys(("time", "deadline", "max_time", "time_limit"), _key("limits.time")),
    "price": _money("hardware.price"), "from_scratch": _switch({"weights": "random"}),
    **dict.fromkeys(("backend", "engine"), _key("framework")),
    "explain": _nothing("`--why` explains each figure"),
    "prompt": _nothing("the prompt stands behind the run: `memfit generate RUN PROMPT`"),
    # around the steps
    "save_steps": _key("run.save_every"), "eval_steps": _key("run.evaluate_every"),
    "save_total_limit": _key("run.keep"), "evals_per_epoch": _times, "saves_per_epoch": _times,
    "eval_table_size": _key("run.samples"), "eval_max_new_tokens": _key("run.sample_tokens"),
    "greater_is_better": lambda value: Answer(
        {"run.best_is": "least" if _is_off(value) else "most", "run.best_by": "loss"},
        "`run.best_by` names the figure"),
    "metric_for_best_model": _metric, "load_best_model_at_end": _switch({"run.best_by": "loss"}),
    **dict.fromkeys(("early_stopping_patience", "early_stopping_steps"), _patience),
    "early_stopping_threshold": lambda value: Answer(
        {"run.min_improvement": value, "run.patience": 3, "run.best_by": "loss"}),
    "report_to": _trackers, "use_tensorboard": _switch({"run.trackers": ["tensorboard"]}),
    # what nothing here depends on
    **dict.fromkeys(
        ("save_strategy", "logging_steps", "run_name",
         "eval_strategy", "evaluation_strategy", "push_to_hub", "wandb_project", "device_map",
         "template", "dataset_text_field", "group_by_length",
         "remove_unused_columns", "dataloader_num_workers", "random_state",
         "special_tokens", "trust_remote_code", "do_train", "overwrite_output_dir"),
        _UNSEEN,
    ),
    "output_dir": _FOLDER, "folder": _FOLDER, "out": _FOLDER, "output": _FOLDER,
    "name": _FOLDER, "for": _nothing("as `memfit solve sequence_length MODEL`"),
    **dict.fromkeys(("interleave_probs", "mix_strategy", "dataset_mixture"), _MIXTURE),
    "resume": _RESUME, "resume_from_checkpoint": _RESUME, "auto_resume_from_checkpoints": _RESUME,
}  # fmt: skip

_BUILDS = "{} builds on transformers' Trainer, and on TRL's of pairs and of sampled answers (`trl`)"
_FILE = "`memfit check FILE` reads a file of its own"
_SCRIPT = "`memfit check train.py` reads a script of its own"
# values that people write under a key whose own values are others
ELSEWHERE: dict[str, dict[str, Answer]] = {
    "method": {
        **{name: Answer({"task.objective": name}) for name in TASKS},
        "peft": Answer({"method": "lora"}),
        **dict.fromkeys(
            ("finetune", "finetuning", "full_finetuning", "full_finetune", "full_ft",
             "full_fine_tuning"),
            Answer({"method": "full"}),
        ),
        **dict.fromkeys(("lora+", "loraplus", "lora_plus"), Answer(
            {"optimizer.lora_plus": 16, "method": "lora"}, "16 stands for the ratio of the rates")),
        "rslora": Answer({"lora.scaling": "rank-stabilised", "method": "lora"}),
        "qdora": Answer({"base_format": "nf4", "method": "dora"}),
    },
    "task.objective": {
        **dict.fromkeys(
            ("pretraining", "pt", "cpt", "clm", "continued_pretraining", "continual_pretraining"),
            Answer({"task.objective": "pretrain"}),
        ),
        **dict.fromkeys(
            ("instruction_tuning", "instruct", "finetune", "finetuning", "supervised"),
            Answer({"task.objective": "sft"}),
        ),
        **dict.fromkeys(("reward_model", "reward model", "rm", "reward_modeling", "orm"),
                        Answer({"task.objective": "reward"})),
        "rlhf": Answer({"task.objective": "ppo"}, "`grpo`, `rloo` and `online_dpo` sample, too"),
        "gspo": Answer({"task.objective": "grpo", "policy.importance_sampling_level": "sequence"}),
        "ipo": Answer({}, "of pairs of answers there are dpo, simpo, orpo and cpo"),
    },
    "optimizer.name": {
        word: Answer({"optimizer.name": here}) for word, here in OPTIMIZERS.items() if word != here
    } | {"galore": Answer({}, "GaLore is not described: `adamw8bit` or `method: lora` hold less")},
    "offload": {
        **dict.fromkeys(("cpu", "true"), Answer({"offload": "optimizer"}, "parameters may wait in"
                        " the host's memory, too: `offload: parameters`")),
    },
    "precision": {
        **dict.fromkeys(("4bit", "int4", "nf4", "4"), Answer(NF4)), "fp4": Answer(
            {"base_format": "fp4", "method": "lora"}, "`fp4-mixed` computes products in fp4"),
        **dict.fromkeys(("8bit", "int8", "8"), Answer(INT8)),
        **{word: Answer({"precision": here.replace("fp16", "fp16-mixed")})
           for word, here in DTYPES.items()},
    },
    "framework": {
        **{name: Answer({"framework": "hf-trainer"}, f"{_BUILDS.format(title)}; {_FILE}")
           for name, title in (("axolotl", "axolotl"), ("llama_factory", "LLaMA-Factory"),
                               ("llamafactory", "LLaMA-Factory"))},
        "ms_swift": Answer({"framework": "hf-trainer"}, _BUILDS.format("ms-swift")),
        "swift": Answer({"framework": "hf-trainer"}, _BUILDS.format("ms-swift")),
        **dict.fromkeys(("transformers", "huggingface", "hf", "peft"),
                        Answer({"framework": "hf-trainer"})),
        **dict.fromkeys(("nemo", "megatron_lm"), Answer({"framework": "megatron"})),
        **dict.fromkeys(("accelerate", "lightning", "pytorch", "pytorch_lightning", "torch"),
                        Answer({}, f"the step is then the script's: {_SCRIPT}")),
        **dict.fromkeys(("unsloth", "verl", "openrlhf"),
                        Answer({}, "no step of its kernels or engines is described here; memfit's"
                                   " own (`framework: memfit`) and TRL's (`trl`) are")),
    },
}  # fmt: skip

# a table of the request -> its key that people mean by a value alone
MEANT = {
    "task": "objective", "hardware": "device", "optimizer": "name", "limits": "memory",
    "lora": "rank", "freeze": "last_blocks", "reward": "funcs",
}  # fmt: skip


def describe_value(key: str, value: Any) -> str:
    """A hint on a value that people write under a key, whose place is elsewhere; "" for others."""
    if key in MEANT and isinstance(value, str | int) and not isinstance(value, bool):
        return f"it holds keys of its own: `{key}: {{{MEANT[key]}: {as_yaml(value)}}}`"
    answer = ELSEWHERE.get(key, {}).get(str(value).lower().replace("-", "_"))
    return _describe(answer) if answer else ""


def describe_word(word: str, value: Any) -> str:
    """A hint that says how a word of another trainer is written here; "" for an unknown word."""
    answer_of = WORDS.get(word) or WORDS.get(word.lower().replace("-", "_"))
    return _describe(answer_of(value)) if answer_of else ""


def _describe(answer: Answer) -> str:
    pairs = [f"`{key}: {as_yaml(v)}`" for key, v in answer.changes.items()]
    if not pairs:
        return answer.note
    others = f" (with {' and '.join(pairs[1:])})" if len(pairs) > 1 else ""
    line = f"that is {pairs[0]}{others} here"
    return f"{line}; {answer.note}" if answer.note else line


# what each trainer's name means under `framework`, as hints
TRAINERS = {name: _describe(answer) for name, answer in ELSEWHERE["framework"].items()}
