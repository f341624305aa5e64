"""The keys of torchtitan's configurations, by what they do to memory.

Source: torchtitan 0.3.0 (config/configs.py, trainer.py, components), and 0.2 for its TOML files.
A group that is declared stands for all keys below it.
"""

from __future__ import annotations

from memfit.check.keys import effects, still

STILL = still({
    "what is logged, saved and measured, and where": """job metrics checkpoint comm dump_folder
        profiler profiling
        debug.print_config debug.save_config_file debug.enable_structured_logging
        debug.deterministic_warn_only debug.spmd_typechecking memory_estimation
        experimental.custom_args_module experimental.custom_import""",
    "which data are read, by how many workers, and in which order": """dataloader tokenizer
        validator.dataloader validation.dataset validation.dataset_path
        hf_assets_path training.dataset training.dataset_path training.data_parallel_degree
        model.tokenizer_path model.hf_assets_path training.max_norm_error_if_nonfinite""",
    "it is a number of steps or a rate": """lr_scheduler training.warmup_steps validator.freq
        validation.freq validator.steps validation.steps training.seed training.gc_freq
        training.gc_debug training.deterministic""",
    "a label of the configuration": "model.name model.print_after_conversion",
    "how gradients are summed": "training.mixed_precision_reduce",
    "how a block is computed again, with the same tensors": """
        activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check
        activation_checkpoint.debug activation_checkpoint.early_stop
        activation_checkpoint.visualize_memory_budget_pareto""",
    "which parts `compile.enable` compiles": "compile.components compile.backend",
})  # fmt: skip

MOVED = effects(
    {
        ("nothing", "an engine that generates, an encoder, or ranks that come and go"): """
            async_loop generator rollouter encoder fault_tolerance hf_model override""",
        ("nothing", "weights are stored in another way, or replaced"): """model_spec.converters
            model.converters quantize float8 mx nvfp4 lora training.enable_cpu_offload
            training.dtype training.mixed_precision_param""",
        ("states", "the blocks are others"): """model_spec.num_mtp_layers
            model_spec.moe_comm_backend model_spec.tp_gemm_backend model_spec.attn_backend
            model_spec.attn_type model.use_flex_attn model.attn_mask_type model_spec""",
        ("weights", "the optimizer is another"): """optimizer.param_groups optimizer
            optimizer.early_step_in_backward optimizer.optimizer_factory_kwargs_by_name""",
        ("step", "an evaluation of rows of its own"): "validator validation",
        ("states", "ranks share rows or blocks in another way"): """
            parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree
            parallelism.expert_parallel_comm_backend parallelism.spmd_backend
            parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_split_points
            parallelism.pipeline_parallel_schedule_csv
            parallelism.pipeline_parallel_first_stage_less_layers
            parallelism.pipeline_parallel_last_stage_less_layers
            parallelism.context_parallel_load_balancer parallelism.context_parallel_ptrr_mask_key
            parallelism.context_parallel_rotate_method parallelism.enable_fsdp_symm_mem
            parallelism.disable_loss_parallel""",
        ("states", "compiled kernels keep other tensors than are described"): """
            parallelism.enable_compiled_autograd activation_checkpoint.memory_budget""",
        ("states", "other tensors are kept for the backward"): """activation_checkpoint loss
            activation_checkpoint.selective_ac_option""",
        ("step", "other kernels, with workspaces of their own"): """debug.detect_anomaly
            debug.deterministic debug.batch_invariant debug.moe_force_load_balance""",
    },
    off={
        "activation_checkpoint.selective_ac_option": ("op",),
        "parallelism.expert_parallel_degree": (1,), "training.dtype": ("float32",),
        "parallelism.expert_tensor_parallel_degree": (1,),
        "training.mixed_precision_param": ("bfloat16",),
        "parallelism.context_parallel_rotate_method": ("allgather",),
        "parallelism.spmd_backend": ("default", "none"), "lora": (),
        "parallelism.expert_parallel_comm_backend": ("standard",),
    },
)  # fmt: skip
