"""The keys of DeepSpeed's JSON, by what they do to memory.

Source: DeepSpeed 0.19.8 (runtime/config.py, runtime/zero/config.py, runtime/precision_config.py).
"""

from __future__ import annotations

from memfit.check.keys import effects, still

_ZERO = "zero_optimization"
STILL = still({
    "what is logged, measured and saved": """steps_per_print wall_clock_breakdown dump_state
        memory_breakdown tensorboard wandb comet csv_monitor monitor_config flops_profiler
        comms_logger comms_config timers checkpoint nebula log_level memfit vocabulary_size
        use_node_local_storage disable_python_gc aio""",
    "a number of rows that the micro-batch decides, of steps, or of a scale": """train_batch_size
        prescale_gradients gradient_predivide_factor gradient_allreduce_op seed dataloader_drop_last
        fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis
        fp16.min_loss_scale fp16.auto_cast fp16.consecutive_hysteresis bf16.check_grad_overflow
        bf16.loss_scale bf16.loss_scale_window bf16.initial_scale_power bf16.hysteresis
        bf16.min_loss_scale bf16.auto_cast bf16.consecutive_hysteresis bf16.check_overflow""",
    "it allows what the files ask for": """zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        elasticity""",
    "transformers' blocks are torch's own checkpoints, which it does not configure":
        "activation_checkpointing",
    "of ranks that share rows, of which there are none": "seq_parallel_communication_data_type",
    "how shards are reduced, loaded and saved": f"""{_ZERO}.reduce_scatter
        {_ZERO}.allgather_partitions {_ZERO}.round_robin_gradients
        {_ZERO}.ignore_unused_parameters {_ZERO}.stage3_gather_16bit_weights_on_model_save
        {_ZERO}.stage3_gather_fp16_weights_on_model_save {_ZERO}.elastic_checkpoint
        {_ZERO}.gather_16bit_weights_on_model_save {_ZERO}.load_from_fp32_weights
        {_ZERO}.pipeline_loading_checkpoint {_ZERO}.override_module_apply
        {_ZERO}.log_trace_cache_warnings {_ZERO}.enable_sanity_checks
        {_ZERO}.compute_grad_norm {_ZERO}.use_all_reduce_for_fetch_params
        {_ZERO}.allgather_sequential {_ZERO}.stage3_allgather_sequential
        {_ZERO}.use_multi_rank_bucket_allreduce {_ZERO}.cpu_offload_use_pin_memory""",
    "of the host or a disk": " ".join(
        f"{_ZERO}.{part}.{key}" for part in ("offload_optimizer", "offload_param")
        for key in ("pin_memory", "buffer_count", "buffer_size", "fast_init", "pipeline_read",
                    "pipeline_write", "nvme_path", "max_in_cpu", "cpuadam_cores_perc")
    ),
    "of the optimizer's arithmetic, or its schedule": " ".join(
        f"{part}.{key}" for part in ("optimizer.params", "scheduler.params")
        for key in ("adam_w_mode", "bias_correction", "warmup_max_lr", "warmup_min_lr",
                    "warmup_type", "total_num_steps", "last_batch_iteration", "cos_min_ratio",
                    "warmup_min_ratio")
    ),
})  # fmt: skip

MOVED = effects(
    {
        ("nothing", "weights are compressed, or tried in many ways"): """compression_training
            autotuning quantize_training amp""",
        ("states", "fewer tokens or blocks run"): """data_efficiency progressive_layer_drop
            curriculum_learning random_ltd sparse_attention""",
        ("nothing", "ranks share the model in another way"): """sequence_parallel_size
            tensor_parallel pipeline data_parallel_size""",
        ("states", "compiled kernels keep other tensors than are described"): "compile",
        ("nothing", "what is stored and reduced is of another dtype"): """torch_autocast data_types
            communication_data_type fp32_allreduce bf16.bf16_master_weights_and_grads
            bf16.bf16_optimizer_states fp16.fp16_master_weights_and_grads
            bf16.immediate_grad_update""",
        ("step", "an engine that generates, beside the trained model"): "hybrid_engine inference",
        ("step", "another loss, or values of curvature"): "eigenvalue",
        ("step", "gradients of embeddings in another form"): "sparse_gradients disable_allgather",
        ("nothing", "optimizer states are split, packed or moved in another way"): f"""
            {_ZERO}.zenflow {_ZERO}.legacy_stage1 {_ZERO}.offload_optimizer.super_offload
            {_ZERO}.mics_shard_size {_ZERO}.mics_hierarchical_params_gather
            {_ZERO}.zero_quantized_weights {_ZERO}.zero_quantized_gradients
            {_ZERO}.zero_quantized_nontrainable_weights {_ZERO}.cpu_offload_params
            {_ZERO}.cpu_offload_param""",
        ("step", "more of the weights is held, or gathered at once"): f"""
            {_ZERO}.zero_hpz_partition_size {_ZERO}.module_granularity_threshold
            {_ZERO}.stage3_module_granularity_threshold {_ZERO}.leaf_module
            {_ZERO}.model_persistence_threshold {_ZERO}.stage3_model_persistence_threshold
            {_ZERO}.save_muon_momentum_buffer_in_memory {_ZERO}.parameter_alignment""",
        ("step", "gradients that are not in one buffer"): f"""{_ZERO}.contiguous_gradients""",
        ("step", "products keep other tensors"): f"""{_ZERO}.memory_efficient_linear""",
    },
    off={
        "compile": ({"deepcompile": False}, {"disable": True}), "sequence_parallel_size": (1,),
        "tensor_parallel": ({"autotp_size": 0}, {"autotp_size": 1}),
        f"{_ZERO}.mics_shard_size": (-1,), f"{_ZERO}.zero_hpz_partition_size": (1,),
        f"{_ZERO}.contiguous_gradients": (True,), f"{_ZERO}.memory_efficient_linear": (True,),
    },
)  # fmt: skip
