"""The keys of transformers' TrainingArguments and of accelerate's FSDP, by what they do to memory.

Sources: transformers 5.23 (training_args.py, trainer.py) and 4.57 for its older keys; accelerate
1.14 (utils/dataclasses.py).
"""

from __future__ import annotations

from memfit.check.keys import effects, still

CLASSIFIER = "a classifier takes the place of the head, which is not described"
COMPILED = "compiled kernels keep other tensors than are described"
ON_THE_CPU = "the run is not on the device"
STEPS_AND_RATES = "it is a number of steps or a rate"
LOGS = "what is logged, saved or uploaded, and where"
DATA = "which data are read, by how many workers, and in which order"
# a few rows of a vocabulary, which embeddings have room for or grow by: kilobytes
TOKENS = "it names tokens: a few rows of the embedding at most"
NOISE = "noise of the embedding's size, which is let go before the first block runs"
GROUPS = "the optimizer's parameters in other groups, with the same states"

STILL = still({
    LOGS: """output_dir overwrite_output_dir report_to run_name project trackio_space_id
        trackio_bucket_id trackio_static_space_id logging_steps logging_dir logging_strategy
        logging_first_step logging_nan_inf_filter log_level log_level_replica log_on_each_node
        disable_tqdm save_steps save_strategy save_total_limit save_only_model save_safetensors
        save_on_each_node load_best_model_at_end metric_for_best_model greater_is_better
        enable_jit_checkpoint push_to_hub push_to_hub_model_id push_to_hub_organization
        push_to_hub_token hub_token hub_model_id hub_strategy hub_private_repo hub_always_push
        hub_revision resume_from_checkpoint restore_callback_states_from_checkpoint
        include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics debug do_train
        do_predict""",
    DATA: """dataset_name dataset_config dataset_train_split dataset_test_split dataset_num_proc
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
        dataloader_drop_last remove_unused_columns label_names train_sampling_strategy
        length_column_name group_by_length ignore_data_skip data_seed trust_remote_code
        dispatch_batches accelerator_config.dispatch_batches accelerator_config.even_batches
        accelerator_config.use_seedable_sampler accelerator_config.non_blocking
        accelerator_config.use_configured_state""",
    STEPS_AND_RATES: """num_train_epochs warmup_ratio lr_scheduler_kwargs adam_epsilon
        average_tokens_across_devices eval_steps eval_delay eval_on_start prediction_loss_only
        eval_do_concat_batches eval_use_gather_object""",
    "how processes are started and reach each other": """local_rank ddp_backend ddp_timeout
        ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph""",
    "as many bytes of buckets in pieces of another size": "ddp_bucket_cap_mb",
    "it changes how products are rounded": "tf32",
    "it hands back what the allocator holds and no tensor uses": "torch_empty_cache_steps",
    NOISE: "neftune_noise_alpha",
})  # fmt: skip

MOVED = effects(
    {
        ("states", COMPILED): """torch_compile torch_compile_backend torch_compile_mode
            torchdynamo""",
        ("states", "which of Liger's kernels run"): "liger_kernel_config",
        ("step", "log-probabilities of all the logits are made"): "label_smoothing_factor",
        ("step", "keys and values of all blocks are kept"): "use_cache",
        ("weights", "what the optimizer keeps may be another"): """optim_args optim_target_modules
            adafactor""",
        ("states", "rows are halved until they fit"): "auto_find_batch_size",
        ("nothing", ON_THE_CPU): "use_cpu no_cuda use_mps_device use_ipex jit_mode_eval",
        ("nothing", "ranks share the model in another way"): "parallelism_config sharded_ddp",
        ("states", "rows of a rank, or how gradients wait"): """per_gpu_train_batch_size
            split_batches accelerator_config""",
        ("nothing", "apex stores other copies"): "half_precision_backend fp16_opt_level",
        ("step", "deterministic kernels have workspaces of their own"): "full_determinism",
        ("step", "an evaluation that keeps logits, generates or casts the model"): """
            bf16_full_eval fp16_full_eval eval_accumulation_steps include_for_metrics
            include_inputs_for_metrics batch_eval_metrics predict_with_generate
            generation_max_length generation_num_beams generation_config""",
    },
    off={
        "half_precision_backend": ("auto", "cuda_amp"), "torchdynamo": ("eager",),
        "torch_compile_backend": ("no",),
    },
)  # fmt: skip

# of accelerate's FSDP, in `fsdp_config`, each with and without the prefix `fsdp_`
_OF_FSDP = still({
    "how shards are loaded and saved": """state_dict_type final_state_dict_type sync_module_states
        cpu_ram_efficient_loading""",
    "how units are named: each is a block": """transformer_layer_cls_to_wrap min_num_params
        use_orig_params""",
    "what is fetched ahead of the backward is as described (BACKWARD_PRE), or less":
        "backward_prefetch backward_prefetch_policy limit_all_gathers",
    "of the host": "cpu_offload_pin_memory",
})  # fmt: skip
STILL_OF_FSDP = {
    f"fsdp_config.{prefix}{key}": why for key, why in _OF_FSDP.items() for prefix in ("", "fsdp_")
}
_MOVED_OF_FSDP = effects({
    ("states", "units are of another device's kind"): "xla xla_fsdp_v2 xla_fsdp_grad_ckpt",
    ("step", "modules that stay whole"): "ignored_modules ignored_params",
    ("nothing", "what is stored and gathered is of another dtype"): "mixed_precision_policy",
})  # fmt: skip
MOVED_OF_FSDP = {
    f"fsdp_config.{prefix}{key}": effect
    for key, effect in _MOVED_OF_FSDP.items() for prefix in ("", "fsdp_")
}  # fmt: skip
