"""DeepSpeed's JSON: ZeRO, batch, precision, optimizer and schedule."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export.files import OPTIMIZER_SAYS, File
from memfit.export.needs import find_needs
from memfit.export.target import Draft, Job, Target, exports
from memfit.plan.frameworks.deepspeed import SQUARED
from memfit.records.recipe import Recipe

NAME = "deepspeed.json"
# sizes in elements: our option -> the key within `zero_optimization`
SIZES = {
    "reduce_bucket_size": "reduce_bucket_size", "allgather_bucket_size": "allgather_bucket_size",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters", "sub_group_size": "sub_group_size",
}  # fmt: skip
PRECISIONS = {
    "bf16-mixed": {"bf16": {"enabled": True}}, "fp16-mixed": {"fp16": {"enabled": True}},
}  # fmt: skip
SCRIPT = (
    "train.py is yours: the model, its adapters and its data are said there; `--to trl` writes all"
    " of a plan of this step"
)
SCHEDULES = ("constant", "linear", "cosine")  # of these, cosine alone has a floor
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
    frameworks = ("deepspeed",)
    launches = True
    reads_back = True
    says: ClassVar = CONFIG_SAYS
    axes: ClassVar = frozenset({"dp_shard", "dp_replicate"})

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        values, left = write_config(job)
        start = f"deepspeed --num_gpus {job.per_node} train.py --deepspeed {NAME}"
        if job.nodes > 1:
            start = f"deepspeed --hostfile hosts train.py --deepspeed {NAME}"
        return Draft(
            files=(File(name=NAME, data=values, checked=True),), left=left, start=start,
            needs=find_needs(job.recipe, has=("deepspeed",)), notes=(SCRIPT, *_schedule_note(job)),
        )  # fmt: skip


def _schedule_note(job: Job) -> tuple[str, ...]:
    """A schedule whose end is not known."""
    if job.steps or job.recipe.optimizer.schedule == "constant":
        return ()
    return ("scheduler: `total_num_steps: auto` is filled in by transformers' Trainer",)


def write_config(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """The JSON's keys, and what they cannot say."""
    recipe, p = job.recipe, job.recipe.parallel
    stage = p.zero if p.dp_shard > 1 or recipe.framework == "deepspeed" else 0
    optimizer, left = _optimizer(recipe, job.steps)
    values: dict[str, Any] = {
        **PRECISIONS[recipe.precision],
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "train_batch_size": recipe.global_batch,
        "gradient_clipping": recipe.optimizer.clip_norm,
        **optimizer,
    }
    zero: dict[str, Any] = {"stage": stage}
    if p.dp_shard > 1 and not p.reshard_after_forward:
        left["parallel.reshard_after_forward"] = "false: limits of elements decide in stage 3"
    for ours, key in SIZES.items():
        if ours in recipe.options:
            zero[key] = recipe.options[ours] or ("auto" if ours in SQUARED else 0)
    if recipe.options.get("overlap_comm"):
        zero["overlap_comm"] = True
    zero |= _offload(recipe, stage, left)
    values["zero_optimization"] = zero
    return values, left


def _optimizer(recipe: Recipe, total: int) -> tuple[dict[str, Any], dict[str, str]]:
    made, left = recipe.optimizer, {}
    params: dict[str, Any] = {"lr": made.learning_rate, "weight_decay": made.weight_decay}
    params |= {"betas": [made.beta1, made.beta2], "eps": made.eps}
    if made.name != "adamw":  # which a trainer's own file can name
        left["optimizer.name"] = f"{made.name}: none of DeepSpeed's own"
    if made.implementation == "foreach":
        params["torch_adam"] = True
    values: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}}
    if made.schedule not in SCHEDULES or (made.schedule == "linear" and made.floor):
        floor = f" with `optimizer.floor: {made.floor}`" if made.floor else ""
        left["optimizer.schedule"] = f"{made.schedule}{floor}: none of DeepSpeed's"
    warmup = made.warmup(total)
    if made.warmup_ratio and not total:
        left["optimizer.warmup_ratio"] = f"{made.warmup_ratio}: how many steps it is is not known"
    warm = {
        "warmup_num_steps": max(warmup, LEAST_WARMUP),
        "warmup_type": "linear",
        "total_num_steps": total or "auto",
    }
    scheduled = made.schedule != "constant" or warmup
    if scheduled and warmup < LEAST_WARMUP:
        left["optimizer.warmup_steps"] = f"{warmup}: DeepSpeed's are {LEAST_WARMUP}"
    if made.schedule == "linear":
        values["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {**warm, "warmup_max_lr": made.learning_rate},
        }
    elif made.schedule == "cosine":
        values["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {**warm, "cos_min_ratio": made.floor},
        }
    elif warmup:
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
