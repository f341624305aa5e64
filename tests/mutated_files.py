"""Other trainers' files that fit, and keys of those trainers that move memory, to be added.

`MOVING` holds, of each tool, arguments of its own classes with a value that brings another model,
engine, loss, optimizer, mesh or dtype, or keeps other tensors: read from the tools' documentation
and code, and not from memfit's declarations. None is described.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import neighbour_plans
from memfit import api
from memfit.check import readers
from memfit.check.keys import find_declared
from memfit.core.errors import InvalidRequest
from memfit.records.request import read_yaml

BIG = "Qwen/Qwen2.5-72B-Instruct"
MOVING: dict[str, dict[str, Any]] = {
    "trl": {
        "teacher_model_name_or_path": BIG, "reward_model_path": BIG, "sft_model_path": BIG,
        "reward_model_name_or_path": BIG, "judge": "pair_rm", "use_vllm": True, "rloo_k": 4,
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5, "num_generations": 8,
        "simpo_gamma": 0.5, "cpo_alpha": 1.0, "desirable_weight": 1.0, "rpo_alpha": 1.0,
        "beta": 0.1, "lmbda": 0.5, "max_completion_length": 1024, "max_new_tokens": 512,
        "num_ppo_epochs": 4, "num_mini_batches": 2, "response_length": 512, "kl_coef": 0.05,
        "sync_ref_model": True, "num_iterations": 2, "steps_per_generation": 8,
        "cast_lm_head_to_fp32": True, "top_entropy_quantile": 0.5, "entropy_coef": 0.1,
        "center_rewards_coefficient": 0.01, "generate_during_eval": True, "ld_alpha": 0.5,
        "use_weighting": True, "precompute_ref_log_probs": True, "use_uld_loss": True,
        "activation_offloading": True, "router_aux_loss_coef": 0.001, "use_dora": True,
        "lora_target_parameters": ["experts"], "model_init_kwargs": {"use_cache": True},
        "torch_compile": True, "torch_compile_backend": "inductor", "auto_find_batch_size": True,
        "label_smoothing_factor": 0.1, "liger_kernel_config": {"rope": True}, "use_cache": True,
        "optim_target_modules": ["q_proj"], "optim": "galore_adamw", "fp16_full_eval": True,
        "bf16_full_eval": True, "full_determinism": True, "use_cpu": True, "loss_type": "dft",
        "parallelism_config": {"tp_size": 2}, "attn_implementation": "flex_attention",
        "use_transformers_paged": True, "ref_model_name_or_path": BIG, "whiten_rewards": True,
        "reward_funcs": ["accuracy"], "lora_task_type": "SEQ_CLS",
    },
    "llamafactory": {
        "pissa_init": True, "use_dora": True, "use_galore": True, "galore_rank": 16,
        "use_apollo": True, "use_badam": True, "use_muon": True, "use_adam_mini": True,
        "use_llama_pro": True, "stage": "rm", "reward_model": BIG, "ref_model": BIG,
        "pref_loss": "simpo", "simpo_gamma": 0.5, "pref_ftx": 0.1, "kto_chosen_weight": 1.0,
        "ppo_epochs": 4, "shift_attn": True, "mixture_of_depths": "convert",
        "use_unsloth": True, "use_unsloth_gc": True, "upcast_layernorm": True,
        "upcast_lmhead_output": True, "resize_vocab": True, "add_tokens": "<a>,<b>",
        "moe_aux_loss_coef": 0.01, "fp8": True, "use_kt": True, "use_mca": True,
        "oft_rank": 8, "finetuning_type": "oft", "rope_scaling": "yarn", "use_dft_loss": True,
        "use_asft_loss": True, "use_eaft_loss": True, "torch_compile": True,
        "neftune_noise_alphas": 5, "freeze_trainable_modules": "all", "block_diag_attn": True,
        "optim": "adalomo", "image_max_pixels": 589824, "compute_accuracy": True,
        "train_from_scratch": True, "use_hyper_parallel": True, "fsdp": "full_shard",
        "label_smoothing_factor": 0.1, "tensor_model_parallel_size": 2,
    },
    "axolotl": {
        "rl": "grpo", "trl": {"use_vllm": True, "vllm_mode": "colocate"}, "reward_model": True,
        "process_reward_model": True, "num_labels": 2, "simpo_gamma": 0.5, "orpo_alpha": 0.1,
        "cpo_alpha": 1.0, "kto_desirable_weight": 1.0, "torch_compile": True, "qat": {"weight": 8},
        "quantization": {"weight_dtype": "int4"}, "gptq": True, "peft_use_dora": True,
        "loftq_config": {"loftq_bits": 4}, "peft": {"loftq_config": {"loftq_bits": 4}},
        "peft_init_lora_weights": "pissa", "relora": True, "lisa_n_layers": 4,
        "unfrozen_parameters": ["lm_head.*"], "optimizer": "muon", "dion_rank_fraction": 0.5,
        "activation_offloading": True, "layer_offloading": True, "tiled_mlp": True,
        "chunked_cross_entropy": True, "flex_attention": True, "xformers_attention": True,
        "sage_attention": True, "s2_attention": True,
        "flash_attn_fuse_mlp": True, "flash_attn_cross_entropy": True, "use_kernels": True,
        "tensor_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel_degree": 2,
        "expert_parallel_size": 2, "kd_trainer": True, "kd_online_server": "vllm", "use_eaft": True,
        "processor_type": "AutoProcessor", "overrides_of_model_config": {"num_hidden_layers": 64},
        "plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"], "fp8": True,
        "spectrum_top_fraction": 0.5, "diffusion": {"noise_schedule": "linear"},
        "lora_mlp_kernel": True, "liger_cross_entropy": True, "do_bench_eval": True,
        "generate_samples": True, "gpu_memory_limit": "20GiB", "device_map": "balanced",
        "adapter": "llama-adapter", "gradient_checkpointing": "offload", "deepcompile": True,
        "use_pose": True, "quantize_moe_experts": True, "fp32_norms": True, "mora": {"use": True},
        "selective_checkpointing": {"save": ["attn"]}, "model_quantization_config": "Mxfp4Config",
    },
    "deepspeed": {
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        "autotuning": {"enabled": True}, "amp": {"enabled": True},
        "torch_autocast": {"enabled": True},
        "progressive_layer_drop": {"enabled": True}, "data_efficiency": {"enabled": True},
        "compile": {"deepcompile": True}, "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2, "communication_data_type": "fp32", "sparse_gradients": True,
        "data_types": {"grad_accum_dtype": "fp32"}, "hybrid_engine": {"enabled": True},
        "zero_optimization.zenflow": {"topk_ratio": 0.1}, "zero_optimization.mics_shard_size": 4,
        "zero_optimization.zero_hpz_partition_size": 8,
        "zero_optimization.zero_quantized_weights": True,
        "zero_optimization.zero_quantized_gradients": True,
        "zero_optimization.contiguous_gradients": False,
        "zero_optimization.memory_efficient_linear": False,
        "zero_optimization.stage3_param_persistence_threshold": 1e9,
        "zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
        "zero_optimization.leaf_module": {"classes": ["Block"]},
        "bf16.bf16_master_weights_and_grads": True, "bf16.immediate_grad_update": True,
    },
    "accelerate": {
        "dynamo_config": {"dynamo_backend": "INDUCTOR"}, "use_cpu": True,
        "fp8_config": {"backend": "TE"}, "megatron_lm_config": {"megatron_lm_tp_degree": 2},
        "distributed_type": "MEGATRON_LM", "kt_config": {"enabled": True},
        "parallelism_config": {"parallelism_config_cp_size": 2},
        "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_config.fsdp_reshard_after_forward": "HYBRID_SHARD",
        "fsdp_config.fsdp_auto_wrap_policy": "NO_WRAP",
        "fsdp_config.fsdp_ignored_modules": "lm_head",
        "fsdp_config.fsdp_mixed_precision_policy": "fp32",
    },
    "torchtitan": {
        "training.enable_cpu_offload": True, "training.dtype": "bfloat16",
        "training.mixed_precision_param": "float32", "parallelism.expert_parallel_degree": 2,
        "parallelism.enable_compiled_autograd": True, "parallelism.disable_loss_parallel": True,
        "parallelism.context_parallel_rotate_method": "alltoall",
        "activation_checkpoint.selective_ac_option": "2", "optimizer.name": "Adafactor",
        "activation_checkpoint.mode": "memory_budget", "optimizer.early_step_in_backward": True,
        "model.converters": ["float8"], "validation.enable": True, "quantize.linear": "float8",
        "model.use_flex_attn": True, "fault_tolerance.enable": True, "lora.rank": 8,
        "debug.detect_anomaly": True, "parallelism.enable_fsdp_symm_mem": True,
    },
}  # fmt: skip
BASES = {
    "trl": ("trl-qlora", "trl-full-fsdp"),
    "llamafactory": ("hf-lora-ddp", "hf-qlora", "hf-lora-fsdp", "deepspeed-zero3"),
    "axolotl": ("hf-lora-ddp", "hf-qlora"),
    "deepspeed": ("deepspeed-zero2", "deepspeed-zero3"),
    "accelerate": ("trl-full-fsdp", "hf-lora-fsdp"),
    "torchtitan": ("torchtitan-fsdp",),
}
TARGETS = {"accelerate": "trl"}
VALUES: dict[str, Any] = {}  # of keys whose type allows no 7
for _keys in MOVING.values():
    VALUES |= {key.rpartition(".")[2]: value for key, value in _keys.items()}
TITAN = {
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"local_batch_size": 1, "seq_len": 4096},
    "parallelism": {"data_parallel_shard_degree": 8},
    "activation_checkpoint": {"mode": "full"},
}


@dataclass
class Mutable:
    """Files of one training, of which one gets another key."""

    tool: str
    name: str
    folder: Path
    files: list[Path]
    which: int
    data: dict[str, Any]

    def answer(self, key: str = "", value: Any = None) -> str:
        """The verdict on the files with a dotted key more; "refused" where they are a mistake."""
        file = self.files[self.which]
        before = file.read_text()
        if key:
            file.write_text(_write(file, key, value))
        try:
            checked, plan = api.check(self.files, self.data)
        except InvalidRequest:
            return "refused"
        finally:
            file.write_text(before)
        return api.judge(checked, plan).verdict

    def nest(self, key: str) -> str:
        """A key of a class where the tool's file has it."""
        return f"zero_optimization.{key}" if self.tool == "deepspeed" else key

    def classify(self, key: str) -> str:
        """The class that memfit declares of a key."""
        reader = readers.find(self.tool)
        quiet, _ = find_declared(reader.still, key)
        loud, _ = find_declared(reader.moved, key)
        if quiet and quiet >= loud:
            return "moves no memory"
        return "not described" if loud else "described or unknown"


def make_files(folder: Path) -> Iterator[Mutable]:
    """The exports of plans that `check` says fit, of each tool."""
    for tool, names in BASES.items():
        for name in names:
            place = folder / tool / name
            place.mkdir(parents=True)
            found = _export(tool, name, place)
            if found.answer() == "fits":
                yield found


def _export(tool: str, name: str, place: Path) -> Mutable:
    recipe = neighbour_plans.find_plan(name).recipe
    each = recipe.devices_per_node or recipe.parallel.world
    nodes = recipe.parallel.world // each
    data: dict[str, Any] = {"hardware": {"device": "b200", "count": each, "nodes": nodes}}
    if tool == "torchtitan":
        file = place / "titan.toml"
        file.write_text(_toml(TITAN))
        return Mutable(tool, f"{tool}: {name}", place, [file], 0, data)
    made = api.export(neighbour_plans.find_plan(name), TARGETS.get(tool, tool))
    files = api.write_export(made, place)
    if tool == "deepspeed":
        data["model"] = "llama-3.1-8b"
    else:
        files = [file for file in files if file.suffix != ".json"]
    which = next(
        n for n, file in enumerate(files)
        if readers.find(tool).recognises(read_yaml(file), file)
    )  # fmt: skip
    return Mutable(tool, f"{tool}: {name}", place, files, which, data)


def _write(file: Path, key: str, value: Any) -> str:
    titan = file.suffix == ".toml"
    data = json.loads(json.dumps(TITAN if titan else read_yaml(file)))
    *parents, last = key.split(".")
    inner = data
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return _toml(data) if titan else json.dumps(data)


def _toml(data: dict[str, Any]) -> str:
    plain = {key: value for key, value in data.items() if not isinstance(value, dict)}
    groups = {"": plain} | {key: value for key, value in data.items() if isinstance(value, dict)}
    return "\n".join(
        (f"[{group}]\n" if group else "")
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for group, keys in groups.items()
    )
