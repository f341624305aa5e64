"""DeepSpeed's JSON: ZeRO, batch, precision, optimizer and schedule."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export import Draft, Job, Target, exports
from memfit.export._files import OPTIMIZER_SAYS, File
from memfit.plan.frameworks.deepspeed import SQUARED
from memfit.recipe import Recipe

NAME = "deepspeed.json"
# sizes in elements: our option -> the key within `zero_optimization`
SIZES = {
    "reduce_bucket_size": "reduce_bucket_size", "allgather_bucket_size": "allgather_bucket_size",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters", "sub_group_size": "sub_group_size",
}  # fmt: skip
LEAST_WARMUP = 2  # steps: fewer are made two, and 0 is refused since 0.19.6
CONFIG_SAYS = frozenset({
    "precision", *OPTIMIZER_SAYS, "micro_batch", "accumulation", "offload", "parallel.zero",
    *(f"options.{ours}" for ours in SIZES), "options.overlap_comm",
})  # fmt: skip


@final
class DeepSpeed(Target):
    """What `deepspeed.initialize` and the Trainer's `deepspeed:` read."""

    name = "deepspeed"
    title = "DeepSpeed"
    version = "0.19.8"
    framework = "deepspeed"
    says: ClassVar = CONFIG_SAYS
    axes: ClassVar = frozenset({"dp_shard", "dp_replicate"})

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        values, left = write_config(job)
        start = f"deepspeed --num_gpus {job.per_node} train.py --deepspeed {NAME}"
        if job.nodes > 1:
            start = f"deepspeed --hostfile hosts train.py --deepspeed {NAME}"
        return Draft(files=(File(name=NAME, data=values),), left=left, start=start)


def write_config(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """The JSON's keys, and what they cannot say."""
    recipe, p = job.recipe, job.recipe.parallel
    stage = p.zero if p.dp_shard > 1 or recipe.framework == "deepspeed" else 0
    precision, left = _precision(recipe)
    optimizer, more = _optimizer(recipe)
    left |= more
    values: dict[str, Any] = {
        **precision,
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "train_batch_size": recipe.global_batch,
        "gradient_clipping": recipe.optimizer.clip_norm,
        **optimizer,
    }
    zero: dict[str, Any] = {"stage": stage}
    if p.dp_shard > 1 and not p.reshard_after_forward:
        left["parallel.reshard_after_forward"] = "false: limits of elements decide in stage 3"
    if p.dp_shard > 1 and p.dp_replicate > 1:
        left["parallel.dp_replicate"] = f"{p.dp_replicate}: ZeRO cuts among all ranks"
    for ours, key in SIZES.items():
        if ours in recipe.options:
            zero[key] = recipe.options[ours] or ("auto" if ours in SQUARED else 0)
    if recipe.options.get("overlap_comm"):
        zero["overlap_comm"] = True
    zero |= _offload(recipe, stage, left)
    values["zero_optimization"] = zero
    return values, left


def _precision(recipe: Recipe) -> tuple[dict[str, Any], dict[str, str]]:
    if recipe.precision == "bf16-mixed":
        return {"bf16": {"enabled": True}}, {}
    if recipe.precision == "fp16-mixed":
        return {"fp16": {"enabled": True}}, {}
    left = {}
    if recipe.precision != "fp32":
        left["precision"] = f"{recipe.precision}: 16-bit weights have fp32 copies here"
        return {"bf16": {"enabled": True}}, left
    return {"bf16": {"enabled": False}}, left


def _optimizer(recipe: Recipe) -> tuple[dict[str, Any], dict[str, str]]:
    made, left = recipe.optimizer, {}
    params: dict[str, Any] = {"lr": made.learning_rate, "weight_decay": made.weight_decay}
    kind = "AdamW"
    if made.name == "sgd":
        kind, params["momentum"] = "SGD", made.momentum
    else:
        params |= {"betas": [made.beta1, made.beta2], "eps": made.eps}
        if made.name != "adamw":
            left["optimizer.name"] = f"{made.name}: none of DeepSpeed's; AdamW is set"
        if made.implementation == "foreach":
            params["torch_adam"] = True
    if made.implementation == "loop" or (made.name == "sgd" and made.implementation != "foreach"):
        left["optimizer.implementation"] = f"{made.implementation}: DeepSpeed decides"
    values: dict[str, Any] = {"optimizer": {"type": kind, "params": params}}
    if made.name == "sgd" and recipe.parallel.dp_shard > 1:
        values["zero_allow_untested_optimizer"] = True  # without which ZeRO refuses it
    steps = max(made.warmup_steps, LEAST_WARMUP)
    warm = {"warmup_num_steps": steps, "warmup_type": "linear", "total_num_steps": recipe.steps}
    scheduled = made.schedule != "constant" or made.warmup_steps
    if scheduled and made.warmup_steps < LEAST_WARMUP:
        left["optimizer.warmup_steps"] = f"{made.warmup_steps}: DeepSpeed's are {LEAST_WARMUP}"
    if made.schedule == "linear":
        values["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {**warm, "warmup_max_lr": made.learning_rate},
        }
    elif made.schedule == "cosine":
        values["scheduler"] = {"type": "WarmupCosineLR", "params": {**warm, "cos_min_ratio": 0.0}}
    elif made.warmup_steps:
        del warm["total_num_steps"]
        values["scheduler"] = {
            "type": "WarmupLR",
            "params": {**warm, "warmup_max_lr": made.learning_rate},
        }
    return values, left


def _offload(recipe: Recipe, stage: int, left: dict[str, str]) -> dict[str, Any]:
    held = {"device": "cpu", "pin_memory": True}
    if recipe.offload == "none":
        return {}
    if recipe.offload == "activations" or not stage:
        left["offload"] = f"{recipe.offload}: ZeRO offloads states, and weights in stage 3"
        return {}
    found: dict[str, Any] = {"offload_optimizer": held}
    if recipe.offload == "parameters":
        if stage != 3:
            left["offload"] = f"parameters: of stage 3, not {stage}"
        else:
            found["offload_param"] = held
    return found


exports.register("deepspeed")(DeepSpeed())
