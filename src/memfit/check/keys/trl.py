"""The keys of TRL's scripts, by what they do to memory: SFTConfig, ModelConfig, and the others'.

Source: TRL 1.16 (trainer/*_config.py, experimental/*/*_config.py, scripts/utils.py), and 0.29 for
arguments that have gone since.
"""

from __future__ import annotations

from memfit.check.keys import effects, still
from memfit.check.keys.hugging_face import (
    CLASSIFIER,
    DATA,
    LOGS,
    MOVED_OF_FSDP,
    STILL_OF_FSDP,
    TOKENS,
)
from memfit.check.keys.hugging_face import MOVED as MOVED_OF_TRAINER
from memfit.check.keys.hugging_face import STILL as STILL_OF_TRAINER

ANOTHER = "an argument of another of TRL's trainers, whose step is not described"

STILL = STILL_OF_TRAINER | STILL_OF_FSDP | still({
    DATA: """dataset_streaming dataset_kwargs dataset_text_field dataset_mixture
        datasets shuffle_dataset eval_packing packing_strategy completion_only_loss
        assistant_only_loss truncation_mode dataset_batch_size ignore_bias_buffers
        tokenizer_name_or_path tokenizer_name""",
    "another upload of the same model": "model_revision revision",
    TOKENS: "eos_token pad_token chat_template chat_template_path",
    LOGS: "include_tokens_per_second hub_model_revision wandb_project wandb_entity",
})  # fmt: skip

# of GRPO, RLOO, KTO, online DPO, distillation (GKD, GOLD), rewards, ORPO, CPO, PPO and others
_OTHERS = """
    A2PO_alpha activation_offloading_kwargs add_tail_bucket alpha beta1 beta2 bema_start
    cache_implementation callbacks cast_lm_head_to_fp32 chat_template_kwargs cliprange
    cliprange_value cpo_alpha delta desirable_weight diagnostics_flat_tolerance
    diagnostics_warning_interval discopop_tau distillation_add_tail distillation_alpha
    distillation_is_clip distillation_mode distillation_objective distillation_topk
    distillation_weight dont_reprompt_on_self_success ds3_gather_for_generation
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target
    environment_feedback_only_without_solution epsilon epsilon_high f_alpha_divergence_coef
    f_divergence_type feedback_template filter_all_incorrect fork_threshold_tokens
    force_use_ref_model
    gamma generate_during_eval generate_from_teacher generation_batch_size generation_kwargs
    heartbeat_stale_after_s importance_sampling_level include_environment_feedback
    is_encoder_decoder iw_opd_epsilon iw_opd_gamma judge kl_coef kl_estimator lam ld_alpha lmbda
    local_rollout_forward_batch_size log_completions log_completions_hub_repo log_completions_steps
    log_multimodal log_unique_prompts loss_add_tail loss_top_k loss_weights
    mask_truncated_completions max_completion_length max_inflight_tasks max_new_tokens
    max_prompt_length max_reprompt_len max_staleness max_tool_calling_iterations min_p
    missing_eos_penalty mixture_coef multi_objective_aggregation normalize_advantages
    normalize_reward num_completions_to_print num_generations num_generations_eval num_iterations
    num_loss_tokens_to_skip num_mini_batches num_ppo_epochs num_sample_generations
    num_value_samples off_policy_mask_threshold padding_value prompt_length
    queue_maxsize ref_model_init_kwargs ref_model_mixup_alpha ref_model_sync_steps
    reference_free remove_thinking_from_demonstration repetition_penalty reprompt_template
    request_timeout response_length reverse_kl_top_1_mode reward_clip_range reward_funcs
    reward_weights rloo_k rpo_alpha sapo_temperature_neg sapo_temperature_pos scale_rewards
    seq_kd simpo_gamma solution_template steps_per_generation stop_token stop_token_id
    success_reward_threshold sync_ref_model teacher_prompt_template teacher_server_urls
    teacher_sync_steps teacher_temperature teacher_top_k teacher_update_rate temperature
    token_budget token_level_kl top_entropy_quantile top_k top_p total_episodes tpo_alpha
    tpo_l_gamma transformers_continuous_batching_config uld_crossentropy_weight
    uld_distillation_weight uld_hybrid_matched_weight uld_hybrid_unmatched_weight
    uld_skip_student_eos uld_skip_teacher_eos uld_student_temperature uld_teacher_temperature
    uld_token_merge_strategy uld_use_hybrid_loss undesirable_weight use_adaptive_entropy
    use_bias_correction_kl use_extended_uld use_successful_as_teacher use_uld_loss use_weighting
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vf_coef
    wandb_log_unique_prompts weight_sync_steps weight_sync_timeout whiten_rewards"""
_ENGINES = """
    use_transformers_continuous_batching use_transformers_paged use_vllm vllm_enable_sleep_mode
    vllm_gpu_memory_utilization vllm_group_port vllm_guided_decoding_regex
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_sync_frequency vllm_tensor_parallel_size"""
_MODELS = """
    judge_model_name_or_path model_adapter_name ref_adapter_name ref_model ref_model_name_or_path
    reward_adapters reward_model_name_or_path reward_model_path sft_model_path
    teacher_model_init_kwargs teacher_model_kind teacher_model_name_or_path teacher_model_revision
    teacher_model_server_url teacher_tokenizer_name_or_path use_teacher_server value_model_path"""

MOVED = MOVED_OF_TRAINER | MOVED_OF_FSDP | effects(
    {
        ("states", ANOTHER): _OTHERS,
        ("states", "an engine that generates, beside the trained model"): _ENGINES,
        ("states", "another model beside the trained one"): _MODELS,
        ("blocks", CLASSIFIER): "center_rewards_coefficient num_labels lora_task_type",
        ("states", "activations that wait on the host"): "activation_offloading",
        ("nothing", "how the model is loaded"): """model_init_kwargs device_map config_overrides
            use_unsloth""",
        ("step", "adapters of another kind, or more of them"): """use_dora lora_target_parameters
            use_qalora qalora_group_size""",
        ("step", "the routers' loss keeps their logits"): "router_aux_loss_coef",
        ("step", "a second pass over rows"): "precompute_ref_batch_size",
    },
    off={"lora_task_type": ("CAUSAL_LM",)},
)  # fmt: skip
