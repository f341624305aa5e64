"""TRL's `sft`: its own arguments, the Trainer's, and accelerate's launch file beside them."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export import Draft, Job, exports
from memfit.export._files import File
from memfit.export._hf import (
    DTYPES,
    FOUR_BIT,
    FSDP_AXES,
    MODEL_SAYS,
    QUANTISED,
    TRAINER_SAYS,
    check_eight_bits,
    doubles_scales,
    find_attention,
    recomputes,
    reenters,
    says_method,
    weights_dtype,
    write_adapter_kind,
    write_optimizer,
    write_precision,
    write_steps,
)
from memfit.export.accelerate import NAME as LAUNCH
from memfit.export.accelerate import (
    Trains,
    become_sharded,
    launch,
    shards,
    uses_deepspeed,
    write_deepspeed,
    write_launch,
)
from memfit.plan.frameworks._pairs import TILED
from memfit.plan.frameworks._peft import saved_modules
from memfit.recipe import ADAPTED, Recipe

NAME = "trl.yaml"


@final
class Trl(Trains):
    """Arguments of `trl sft` or `trl dpo`: SFTConfig or DPOConfig, ModelConfig, ScriptArguments."""

    name = "trl"
    title = "TRL"
    version = "1.16"
    framework = "trl"
    says: ClassVar = TRAINER_SAYS | MODEL_SAYS | {"objective", "offload", "freeze"}
    axes: ClassVar = FSDP_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        recipe = job.recipe
        check_eight_bits(recipe, self.name)
        values, left = write_arguments(job)
        script = "dpo" if recipe.prefers else "sft"
        if recipe.objective not in ("sft", "dpo"):
            left["objective"] = f"{recipe.objective}: `trl sft` trains on text, or on answers"
        files, start = [File(name=NAME, data=values)], f"trl {script} --config {NAME}"
        key = "options.trl" if uses_deepspeed(job) else "options.version"
        becomes = {**become_sharded(job), key: TILED}
        own = recipe.framework in (self.framework, "deepspeed")
        if own and recipe.options.get(key.removeprefix("options."), TILED) != TILED:
            left[key] = f"TRL {self.version} makes its loss from tiles of the logits"
        if _reenters(job):
            becomes["options.reentrant"] = True
            if not recipe.options.get("reentrant"):
                left["options.reentrant"] = "false: TRL's are, of adapters in ZeRO-3"
        if job.world > 1 or uses_deepspeed(job):
            config, more = write_launch(job)
            left |= more
            files.append(File(name=LAUNCH, data=config))
            start = f"{launch(job)} -m trl.scripts.{script} --config {NAME}"
            if uses_deepspeed(job):
                files.append(write_deepspeed(job, left))
        elif recipe.offload != "none":
            left["offload"] = f"{recipe.offload}: of FSDP alone"
        return Draft(files=tuple(files), left=left, start=start, becomes=becomes)


def _reenters(job: Job) -> bool:
    """Whether TRL makes blocks reentrant whatever its file says (trainer/sft_trainer)."""
    recipe = job.recipe
    third = uses_deepspeed(job) and recipe.parallel.zero == 3
    return third and recipe.method in ADAPTED and recomputes(job)[0]


def write_arguments(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's keys, and what they cannot say."""
    recipe = job.recipe
    precision, left = write_precision(recipe)
    optimizer, more = write_optimizer(recipe)
    again, blocks = recomputes(job)
    attention, kernel = find_attention(recipe)
    left |= more | blocks | kernel | says_method(recipe, ("full", *ADAPTED))
    if job.own and recipe.weights == "random":
        left["weights"] = "random: TRL loads a model's weights"
    dtype = weights_dtype(recipe)
    values: dict[str, Any] = {
        "model_name_or_path": job.weights,
        "dtype": dtype,
        "attn_implementation": attention,
        "dataset_name": job.data,
        "max_length": recipe.sequence_length,
        **(_pairs(recipe) if recipe.prefers else {"packing": recipe.packing}),
        **write_steps(recipe),
        "gradient_checkpointing": again and not shards(job),
        "gradient_checkpointing_kwargs": {
            "use_reentrant": reenters(job, left, sharded=shards(job)),
        },
        **precision,
        **optimizer,
        **_adapter(recipe, left),
        "output_dir": "outputs",
        "report_to": "none",
    }
    return values, left


def _pairs(recipe: Recipe) -> dict[str, Any]:
    """DPOConfig's own; without a second model the reference is the one without its adapter."""
    return {
        "loss_type": ["sigmoid"],
        "beta": recipe.preference.beta,
        "label_smoothing": recipe.preference.label_smoothing,
        "precompute_ref_log_probs": recipe.preference.reference == "precomputed",
        "disable_dropout": not recipe.lora.dropout,
    }


def _adapter(recipe: Any, left: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if recipe.method in ADAPTED:
        targets = list(recipe.lora.targets)
        values |= {
            "use_peft": True,
            "lora_r": recipe.lora.rank,
            "lora_alpha": _whole(recipe.lora.alpha, left),
            "lora_dropout": recipe.lora.dropout,
            **write_adapter_kind(recipe),
            "lora_target_modules": targets[0] if targets == ["all-linear"] else targets,
        }
        if saved := saved_modules(recipe):
            values["lora_modules_to_save"] = list(saved)
    if recipe.base_format in FOUR_BIT:
        values |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": recipe.base_format,
            "use_bnb_nested_quant": doubles_scales(recipe),
        }
        if recipe.parallel.dp_shard > 1:  # FSDP cuts tensors of one dtype alone
            values["bnb_4bit_quant_storage"] = recipe.compute_dtype
    elif recipe.base_format == "int8":
        values["load_in_8bit"] = True
    elif recipe.method in ADAPTED and recipe.base_format not in (*DTYPES, *QUANTISED):
        left["base_format"] = f"{recipe.base_format}: TRL has bitsandbytes' 4 and 8 bits"
    return values


def _whole(alpha: float, left: dict[str, str]) -> int:
    """TRL reads alpha as a whole number."""
    if alpha != int(alpha):
        left["lora.alpha"] = f"{alpha}: a whole number here"
    return int(alpha)


exports.register("trl")(Trl())
