"""The keys of axolotl's YAML, by what they do to memory.

Source: axolotl 0.19 (utils/schemas, integrations/*/args.py, core/builders), and 0.8 for keys that
have gone since.
"""

from __future__ import annotations

from memfit.check.keys import effects, still
from memfit.check.keys.hugging_face import (
    CLASSIFIER,
    COMPILED,
    DATA,
    GROUPS,
    LOGS,
    MOVED_OF_FSDP,
    NOISE,
    ON_THE_CPU,
    STEPS_AND_RATES,
    STILL_OF_FSDP,
    TOKENS,
)

STILL = STILL_OF_FSDP | still({
    LOGS: """output_dir hub_model_id hub_strategy hub_revision save_safetensors
        save_steps saves_per_epoch save_strategy save_total_limit save_first_step save_only_model
        logging_steps load_best_model_at_end early_stopping_patience metric_for_best_model
        greater_is_better use_tensorboard
        include_tokens_per_second include_tkps profiler_steps profiler_steps_start
        use_wandb wandb_name
        wandb_run_id wandb_mode wandb_project
        wandb_entity wandb_watch wandb_log_model use_mlflow mlflow_tracking_uri
        mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key
        comet_workspace comet_project_name comet_experiment_key comet_mode comet_online
        comet_experiment_config use_trackio trackio_project_name trackio_run_name trackio_space_id
        use_otel_metrics otel_metrics_host otel_metrics_port push_dataset_to_hub hf_use_auth_token
        resume_from_checkpoint auto_resume_from_checkpoints dynamic_checkpoint debug
        loss_watchdog_threshold loss_watchdog_patience axolotl_config_path gradio_title gradio_share
        gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature use_swanlab
        swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace
        swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host
        swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions
        swanlab_completion_log_interval swanlab_completion_max_buffer merge_lora merge_method
        tokenizer_save_jinja_files fsdp_final_state_dict_type""",
    DATA: """datasets test_datasets dataset_prepared_path shuffle_merged_datasets
        shuffle_before_merging_datasets dataset_shard_num dataset_shard_idx skip_prepare_dataset
        num_dataset_shards_to_save dataset_processes dataset_num_proc dataset_exact_deduplication
        dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers
        dataloader_prefetch_factor dataloader_drop_last remove_unused_columns group_by_length
        train_on_inputs excess_length_strategy min_sample_len max_prompt_len
        sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
        sample_packing_mp_start_method sample_packing_eff_est sample_packing_seq_len_multiplier
        curriculum_sampling multipack_real_batches total_num_tokens total_supervised_tokens
        pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation
        streaming streaming_multipack_buffer_size shuffle_seed is_preprocess preprocess_iterable
        trust_remote_code chat_template chat_template_jinja chat_template_kwargs
        default_system_message eval_sample_packing val_set_size role_boundaries""",
    STEPS_AND_RATES: """num_epochs warmup_ratio eval_steps evals_per_epoch eval_strategy
        evaluation_strategy adam_epsilon adam_eps eta_min lr_quadratic_warmup
        cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_scheduler_kwargs
        embedding_lr_scale batch_size do_eval""",
    GROUPS: "loraplus_lr_ratio loraplus_lr_embedding lr_groups embedding_lr",
    TOKENS: """special_tokens tokens eot_tokens added_tokens_overrides tokenizer_type
        tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
        resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings
        fix_untrained_tokens""",
    "which class or upload of the same model": """model_type type_of_model revision_of_model
        base_model_config base_model_ignore_patterns model_revision is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model reinit_weights
        local_rank world_size ddp ddp_timeout ddp_broadcast_buffers ddp_find_unused_parameters
        strict capabilities env_capabilities""",
    "how processes are started, one of a device": """use_ray ray_run_name ray_num_workers
        resources_per_worker""",
    "as many bytes of buckets in pieces of another size": "ddp_bucket_cap_mb",
    "it changes how products are rounded": "tf32",
    "it hands back what the allocator holds and no tensor uses":
        "gc_steps gc_collect_steps torch_empty_cache_steps",
    "adapters that begin where others ended": "lora_model_dir",
    "of adapters, and there are none without `adapter`": "lora_fan_in_fan_out",
    "where weights are before the first step": "low_cpu_mem_usage experimental_skip_move_to_device",
    NOISE: "neftune_noise_alpha noisy_embedding_alpha",
    "it is of a package that axolotl has dropped": "torchdistx_path",
    "of GPTQ's files, and there are none without `gptq`": "gptq_groupsize gptq_model_v1",
    "an older key, which axolotl reads no more": "max_packed_sequence_len eval_table_size",
    "of liger's norms of other classes": "liger_layer_norm liger_rms_norm_gated",
    "a metric of the host's": "eval_causal_lm_metrics",
})  # fmt: skip

_RL = """trl ebft vllm rl_adapter_ref_model orpo_alpha simpo_gamma cpo_alpha rpo_alpha
    kto_desirable_weight kto_undesirable_weight dpo_beta rl_beta dpo_label_smoothing
    precompute_ref_log_probs dpo_use_weighting dpo_use_liger_kernel dpo_padding_free dpo_loss_type
    dpo_loss_weights dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss
    rl kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk
    kd_online_server_base_url kd_online_topk kd_online_server kd_online_timeout
    kd_temperature_min nemo_gym_enabled nemo_gym_datasets nemo_gym_multi_turn
    hatchery trainer_cls diffusion use_eaft eaft_alpha eaft_k
    nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port
    nemo_gym_server_timeout nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_auto_start
    nemo_gym_model_name nemo_gym_max_turns"""

MOVED = MOVED_OF_FSDP | effects(
    {
        ("states", "another step or another loss, which is not described"): _RL,
        ("blocks", CLASSIFIER): """reward_model process_reward_model num_labels cls_model_config
            center_rewards_coefficient""",
        ("states", COMPILED): """torch_compile torch_compile_backend torch_compile_mode
            torch_compile_options deepcompile flex_attn_compile_kwargs""",
        ("nothing", "weights are stored in another way"): """qat quantization gptq bnb_config_kwargs
            model_quantization_config model_quantization_config_kwargs quantize_moe_experts
            use_onebitllms llmcompressor fp8 fp8_config fp8_enable_fsdp_float8_all_gather
            expert_backend nonexpert_quantization fp32_norms fp32_norm_classes
            embeddings_skip_upcast peft_autocast_adapter_dtype float32
            gemma4_fp8_nonexpert gemma4_nf4_nonexpert dsv4_fp8_nonexpert_mode dsv4_bf16_all
            dsv4_fp4_grouped_mode nvfp4_merge_aware nvfp4_merge_aware_start_step""",
        ("nothing", "where weights are, or how ranks share them"): """device device_map max_memory
            gpu_memory_limit lora_on_cpu qlora_sharded_model_loading layer_offloading
            ple_cpu_offload tensor_parallel_size expert_parallel_size
            expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
            expert_parallel_token_capacity expert_parallel_fallback_on_unsupported""",
        ("states", "rows are cut between ranks"): """context_parallel_size sequence_parallel_degree
            heads_k_stride ring_attn_func""",
        ("weights", "other weights are trained, or other states kept"): """unfrozen_parameters
            freeze_mm_modules relora relora_prune_ratio relora_prune_method relora_cpu_offload
            lisa_n_layers lisa_step_interval lisa_layers_attribute optim_args optim_target_modules
            dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of adam_beta3 adam_epsilon2
            qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant
            qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj
            qgalore_queue_size spectrum_top_fraction spectrum_model_name grokfast_alpha
            grokfast_lamb jagged_restart_steps jagged_restart_warmup_steps
            jagged_restart_anneal_steps mora""",
        ("weights", "adapters of another kind, or at other places"): """lora_rank_pattern
            lora_alpha_pattern peft_layers_to_transform peft_layers_pattern
            peft_layer_replication""",
        ("step", "adapters of another kind, or more of them"): """peft_use_dora
            peft_init_lora_weights loftq peft peft_trainable_token_indices
            peft_ensure_weight_tying lora_target_parameters""",
        ("states", "activations that wait on the host, or are made again in another way"): """
            activation_offloading selective_checkpointing tiled_mlp tiled_mlp_num_shards
            tiled_mlp_use_original_mlp chunked_cross_entropy chunked_cross_entropy_num_chunks""",
        ("states", "kernels keep other tensors than are described"): """flash_attn_fuse_mlp
            flash_attn_cross_entropy flash_attn_rms_norm flash_optimum fused_attn_kernel use_kernels
            lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel liger_cross_entropy
            liger_use_token_scaling liger_kernel_impl xformers_attention flex_attention
            sage_attention s2_attention sdpa_varlen flash_attn_d512 large_head_attention
            gemma4_hybrid_attn_impl experts_implementation use_scattermoe use_sonicmoe
            use_dsv4_kernels use_glm_dsa_kernels moe_grouped_backend moe_dequant_chunk_size
            moe_bnb_fast dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dense_mixer
            llama4_linearized_experts""",
        ("step", "attention keeps its scores"): "scaling_softmax",
        ("states", "rows of other lengths than are described"): """use_pose
            pose_split_on_token_ids pose_max_context_len pose_num_chunks batch_flattening
            eval_sequence_len auto_find_batch_size accelerator_config""",
        ("nothing", "a model of images or sounds"): """processor_type processor_kwargs image_size
            image_resize_algorithm""",
        ("nothing", "other values of the model's config"): """overrides_of_model_config
            overrides_of_model_kwargs model_config rope_scaling""",
        ("step", "an evaluation that generates"): """do_causal_lm_eval do_bench_eval bench_dataset
            bench_split generate_samples num_generation_samples generation_max_new_tokens
            generation_temperature generation_top_p generation_top_k generation_prompt_ratio
            generation_do_sample lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model
            eval_max_new_tokens""",
        ("nothing", ON_THE_CPU): "use_cpu no_cuda",
    },
    off={
        "context_parallel_size": (1,), "sequence_parallel_degree": (1,),
        "tensor_parallel_size": (1,), "expert_parallel_size": (1,),
        "peft_autocast_adapter_dtype": (True,), "device_map": ("auto",), "num_labels": (),
    },
)  # fmt: skip
