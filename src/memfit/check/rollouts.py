"""Keys of TRL's trainers that sample answers while they train: GRPOConfig's and RLOOConfig's.

Source: TRL 1.16 (trainer/grpo_config.py, trainer/rloo_config.py), and 0.15 to 0.26 for
`max_prompt_length`, which later ones have no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.check import ConfigReading
from memfit.check.keys import ConfigKeys
from memfit.check.smaller_changes import SAME, Edit
from memfit.core.errors import InvalidRequest
from memfit.objectives import find_objective

OF_RLOO = ("normalize_advantages", "reward_clip_range")
OF_GRPO = (
    "scale_rewards", "importance_sampling_level", "delta", "mask_truncated_completions",
    "use_bias_correction_kl", "top_entropy_quantile", "off_policy_mask_threshold",
)  # fmt: skip
OF_BOTH = ("num_generations", "steps_per_generation", "generation_batch_size", "num_iterations")
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
OWN_LOSSES = ("grpo", "dr_grpo", "dapo")  # that `policy.loss_type` knows; all hold the same bytes
QUIET = (
    "epsilon", "epsilon_high", "delta", "scale_rewards", "reward_weights", "reward_clip_range",
    "importance_sampling_level", "multi_objective_aggregation", "mask_truncated_completions",
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos",
    "vespo_lambda_neg", "vespo_lambda_pos", "top_entropy_quantile", "entropy_coef",
    "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
    "use_adaptive_entropy", "use_bias_correction_kl", "normalize_advantages", "log_completions",
    "log_completions_hub_repo", "log_multimodal", "log_unique_prompts", "num_completions_to_print",
    "wandb_log_unique_prompts", "num_generations_eval", "chat_template_kwargs",
    "ds3_gather_for_generation", "reward_funcs", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "max_length", "transformers_continuous_batching_config",
)  # fmt: skip
ASSUMED_PROMPT = 512
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)  # of the device, vLLM's
OF_SERVER = (
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_group_port", "vllm_model_impl", "vllm_structured_outputs_regex",
    "vllm_guided_decoding_regex", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_mode",
)  # fmt: skip
ENGINE_TRUTHS = ("vllm_enable_sleep_mode", "vllm_importance_sampling_correction")


def find_sampling(data: Mapping[str, Any], reading: ConfigReading) -> str:
    """`grpo` or `rloo` where a file is of one of them, or the command line says so; else ""."""
    stated = reading.get("task.objective")
    if stated is not None:
        return stated if find_objective(str(stated)).samples else ""
    shared = [key for key in OF_BOTH if key in data]
    own = [key for key in OF_GRPO if key in data]
    rloo = [key for key in OF_RLOO if key in data]
    losses = data.get("loss_type") in LOSSES
    if rloo:
        return "rloo"
    if not (shared or own or losses):
        return ""
    if not (own or losses):
        reading.assume(
            f"the file is GRPO's, as it has `{shared[0]}` (`--set task.objective=rloo`: RLOO's)"
        )
    return "grpo"


def read_rollouts(taken: ConfigKeys, reading: ConfigReading, objective: str) -> None:
    """What is sampled, how, and what the policy's loss needs."""
    reading.put("task.objective", objective)
    reading.put("task.packing", False)
    usual = find_objective(objective).sampled
    assert usual is not None
    reading.put("rollout.num_generations", taken("num_generations", usual.num_generations))
    answer = taken("max_completion_length", 512)
    reading.put("rollout.max_completion_length", answer)
    _read_prompt(taken, reading, answer)
    for name, kind in (
        ("temperature", float), ("top_p", float), ("min_p", float), ("repetition_penalty", float),
        ("top_k", int),
    ):  # fmt: skip
        value = taken(name, kind=kind)
        if value is not None:
            reading.put(f"rollout.{name}", max(0, value))
    reading.put("policy.beta", taken("beta", usual.beta))
    reading.put("policy.num_iterations", taken("num_iterations", 1))
    loss = taken("loss_type", "dapo")
    if objective == "grpo" and loss in OWN_LOSSES:
        reading.put("policy.loss_type", loss)
    elif objective == "grpo" and loss not in LOSSES:
        taken.leave("loss_type", loss, f"TRL's own: {', '.join(LOSSES)}", "states")
    _read_batches(taken, reading)
    _read_engine(taken, reading)
    _leave(taken)
    taken.drop(QUIET)


def _read_prompt(taken: ConfigKeys, reading: ConfigReading, answer: int) -> None:
    stated = taken("max_prompt_length", kind=int)
    context = taken.data.get("vllm_max_model_length")
    if stated is None and isinstance(context, int) and context > answer:
        stated = context - answer
        reading.assume(f"prompts are {stated} tokens at most, by `vllm_max_model_length`")
    elif stated is None and reading.get("rollout.max_prompt_length") is None:
        stated = ASSUMED_PROMPT
        reading.assume(
            f"prompts are taken to be {stated} tokens at most: TRL 1.16 does not cut them, and"
            " longer ones need more (`--set rollout.max_prompt_length=N`)"
        )
    if stated is not None:
        reading.put("rollout.max_prompt_length", stated)


def _read_batches(taken: ConfigKeys, reading: ConfigReading) -> None:
    """How many micro-batches a rollout serves: stated, or by the answers of all ranks' rollouts."""
    steps, whole = taken("steps_per_generation", kind=int), taken("generation_batch_size", kind=int)
    if steps is not None and whole is not None:
        raise InvalidRequest(
            f"`steps_per_generation: {steps}` and `generation_batch_size: {whole}` in"
            f" `{taken.file}`: TRL takes one of both",
            hint="leave one out",
        )
    if steps is not None and not reading.own:
        reading.put("options.steps_per_generation", steps)
    if whole is None or reading.own:
        return

    def settle(reading: ConfigReading) -> None:
        world = reading.count("hardware.count") * reading.count("hardware.nodes")
        each = reading.count("micro_batch") * max(world, reading.world)
        if whole % each:
            raise InvalidRequest(
                f"`generation_batch_size: {whole}` in `{taken.file}` is not a multiple of {each}:"
                " a micro-batch of every rank",
                hint=f"`generation_batch_size: {-(-whole // each) * each}`",
            )
        reading.put("options.steps_per_generation", whole // each)

    reading.later.append(settle)


def _read_engine(taken: ConfigKeys, reading: ConfigReading) -> None:
    """vLLM on the same devices, on others, or none."""
    mode = taken("vllm_mode", "colocate")
    uses = taken("use_vllm", False)
    taken.drop(OF_SERVER)
    numbers = {
        "vllm_gpu_memory_utilization": float, "vllm_tensor_parallel_size": int,
        "vllm_max_model_length": int,
    }  # fmt: skip
    found = {key: taken(key, kind=kind) for key, kind in numbers.items()}
    found |= {key: taken(key, kind=bool) for key in ENGINE_TRUTHS}
    if not uses or reading.own:
        return
    if mode not in ("colocate", "server"):
        raise InvalidRequest(
            f"`vllm_mode: {mode}` in `{taken.file}`: TRL has `colocate` and `server`",
            hint="`vllm_mode: colocate` shares the training devices",
        )
    reading.put("options.engine", f"vllm-{mode}")
    for key, value in found.items():
        if value is not None:
            reading.put(f"options.{key}", value)
    if mode == "server":
        reading.assume("vLLM runs on other devices, whose memory is not counted")


def _leave(taken: ConfigKeys) -> None:
    """Note what else holds memory, and is not described."""
    engine = "an engine that generates, beside the trained model"
    for key in ("use_transformers_continuous_batching", "use_transformers_paged"):
        taken.leave_unless(key, (False,), engine, "states")
    for key, why in (
        ("cache_implementation", "a cache of another kind than the one that grows"),
        ("generation_kwargs", "what `generate` is told beside the keys that are described"),
    ):
        taken.leave_unless(key, (None, {}), why, "states")
    taken.leave_unless(
        "sync_ref_model", (False,), "the reference is mixed with the trained weights", "step"
    )
    taken.leave_unless("cast_lm_head_to_fp32", (False,), "the head is widened", "blocks")
    taken.leave_unless("max_tool_calling_iterations", (None, 0), "answers of several turns", "step")


def edit_engine(data: Mapping[str, Any]) -> list[Edit]:
    """What makes vLLM's share smaller between rollouts, or altogether: its own keys."""
    if not data.get("use_vllm") or data.get("vllm_mode", "colocate") != "colocate":
        return []
    edits = []
    if not data.get("vllm_enable_sleep_mode"):
        edits.append(Edit({"vllm_enable_sleep_mode": True}, SAME))
    share = data.get("vllm_gpu_memory_utilization", 0.3)
    if isinstance(share, float):
        edits += [
            Edit({"vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": smaller}, SAME)
            for smaller in SHARES if smaller < share
        ]  # fmt: skip
    return edits
