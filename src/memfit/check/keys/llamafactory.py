"""The keys of LLaMA-Factory's YAML, by what they do to memory.

Source: LLaMA-Factory 0.9.5 (hparams/*.py, model/adapter.py, train/trainer_utils.py).
"""

from __future__ import annotations

from memfit.check.keys import effects, still
from memfit.check.keys.hugging_face import CLASSIFIER, DATA, GROUPS, LOGS, STEPS_AND_RATES, TOKENS
from memfit.check.keys.hugging_face import MOVED as MOVED_OF_TRAINER
from memfit.check.keys.hugging_face import STILL as STILL_OF_TRAINER

STILL = STILL_OF_TRAINER | still({
    LOGS: """plot_loss use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode
        swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret
        include_effective_tokens_per_second hf_hub_token ms_hub_token om_hub_token
        print_param_status early_stopping_steps cache_dir offload_folder wandb_project
        push_to_hub_model_id enable_torch_profiler profile_modules profiler_profile_memory
        profiler_record_shapes profiler_with_stack profiler_output_dir profiler_wait_steps
        profiler_warmup_steps profiler_active_steps profiler_repeat""",
    DATA: """template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history
        streaming buffer_size mix_strategy interleave_probs overwrite_cache
        preprocessing_batch_size preprocessing_num_workers max_samples ignore_pad_token_for_loss
        val_size eval_on_each_dataset tool_format default_system enable_thinking preserve_thinking
        tokenized_path data_shared_file_system disable_shuffling use_fast_tokenizer
        split_special_tokens""",
    STEPS_AND_RATES: "num_epochs",
    GROUPS: "loraplus_lr_ratio loraplus_lr_embedding",
    TOKENS: "eos_token",
    "how generated answers are picked, of which training has none": """do_sample temperature top_p
        top_k num_beams repetition_penalty length_penalty skip_special_tokens max_new_tokens
        eval_num_beams infer_dtype use_kv_cache""",
    "of another engine, which answers and does not train": """vllm_maxlen vllm_gpu_util
        vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction
        sglang_tp_size sglang_config sglang_lora_backend""",
    "of a file that is written after training": """export_size export_device
        export_legacy_format export_hub_model_id export_quantization_bit
        export_quantization_dataset export_quantization_nsamples export_quantization_maxlen""",
    "how processes are started, one of a device": """ray_run_name ray_storage_path
        ray_storage_filesystem ray_num_workers resources_per_worker placement_strategy
        ray_init_kwargs master_addr master_port""",
    "where weights are before the first step": "low_cpu_mem_usage",
    "another upload of the same model": "model_revision",
    "adapters that begin where others ended": "adapter_name_or_path adapter_folder",
    "of models of images, which are not described": """image_min_pixels video_min_pixels video_fps
        video_maxlen use_audio_in_video audio_sampling_rate crop_to_patches
        image_do_pan_and_scan freeze_vision_tower freeze_multi_modal_projector""",
})  # fmt: skip

MOVED = MOVED_OF_TRAINER | effects(
    {
        ("nothing", "another program of LLaMA-Factory's trains, or another engine"): """
            dist_config model_class kernel_config quant_config peft_config sample_backend use_mca
            tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
            context_parallel_size virtual_pipeline_model_parallel_size sequence_parallel use_kt
            kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
            kt_lora_expert_intermediate_size use_hyper_parallel hyper_parallel_args use_unsloth
            use_v1_kernels quantization_device_map device_map""",
        ("states", "another step or another loss, which is not described"): """use_asft_loss
            asft_alpha use_dft_loss use_eaft_loss eaft_alpha pref_loss pref_ftx pref_bco_weight
            pref_beta dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma
            ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ld_alpha
            compute_accuracy""",
        ("states", "another model beside the trained one"): """ref_model ref_model_adapters
            ref_model_quantization_bit reward_model reward_model_adapters
            reward_model_quantization_bit reward_model_type""",
        ("blocks", CLASSIFIER): "num_labels",
        ("weights", "other weights are trained, or other states kept"): """use_galore galore_target
            galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise
            use_apollo apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj
            apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front use_badam
            badam_mode badam_start_block badam_switch_mode badam_switch_interval
            badam_update_ratio badam_mask_mode badam_verbose use_muon use_adam_mini use_llama_pro
            freeze_trainable_modules freeze_extra_modules freeze_language_model""",
        ("nothing", "weights are stored in another way"): """fp8 fp8_backend
            fp8_enable_fsdp_float8_all_gather""",
        ("weights", "adapters of another kind, or at other places"): """module_dropout oft_rank
            oft_block_size oft_target""",
        ("step", "adapters of another kind, or more of them"): """use_dora pissa_init pissa_iter
            pissa_convert create_new_adapter""",
        ("step", "embeddings grow, and are trained beside adapters"): """resize_vocab add_tokens
            add_special_tokens new_special_tokens_config init_special_tokens""",
        ("step", "more is kept in fp32"): "upcast_layernorm upcast_lmhead_output",
        ("states", "kernels keep other tensors than are described"): """shift_attn
            mixture_of_depths use_unsloth_gc block_diag_attn""",
        ("step", "the routers' loss keeps their logits"): "moe_aux_loss_coef",
        ("nothing", "a model of images or sounds"): "image_max_pixels video_max_pixels",
        ("nothing", "other values of the model's config"): "rope_scaling train_from_scratch",
        ("nothing", "the file trains nothing"): "export_dir infer_backend",
        ("nothing", "the launcher's file says it"): "fsdp fsdp_config",
        ("nothing", "what the model computes in"): "compute_dtype",
        ("states", "rows of other lengths than are described"): "model_max_length max_length",
    },
    off={
        "ppo_whiten_rewards": (), "device_map": ("auto",), "context_parallel_size": (1,),
        "tensor_model_parallel_size": (1,), "pipeline_model_parallel_size": (1,),
        "expert_model_parallel_size": (1,), "infer_backend": ("huggingface", "hf"),
        "fp8_backend": ("auto",), "quantization_device_map": (),
    },
)  # fmt: skip
