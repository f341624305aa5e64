"""TRL's `sft`: its own arguments, the Trainer's, and accelerate's launch file beside them."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.base_formats import is_quantised
from memfit.export.data import (
    as_patterns,
    load_with,
    read_notes,
    refuse_shapes,
    refuse_weights,
    write_conversations,
)
from memfit.export.files import File
from memfit.export.hugging_face import (
    FSDP_AXES,
    MODEL_SAYS,
    TRAINER_SAYS,
    check_eight_bits,
    doubles_scales,
    find_attention,
    find_bits,
    recomputes,
    reenters,
    weights_dtype,
    write_adapter_kind,
    write_liger,
    write_optimizer,
    write_precision,
    write_steps,
)
from memfit.export.needs import find_needs
from memfit.export.settle import look_up
from memfit.export.target import Draft, Job, exports, refuse_loss
from memfit.export.targets.accelerate import NAME as LAUNCH
from memfit.export.targets.accelerate import (
    Launches,
    become_sharded,
    launch,
    shards,
    uses_deepspeed,
    write_deepspeed,
    write_launch,
)
from memfit.objectives import find_objective
from memfit.plan.frameworks.hugging_face.pairs import TILED
from memfit.plan.frameworks.hugging_face.peft import saved_modules
from memfit.records.recipe import ADAPTED, Recipe

NAME = "trl.yaml"


@final
class Trl(Launches):
    """Arguments of `trl sft` or `trl dpo`: SFTConfig or DPOConfig, ModelConfig, ScriptArguments."""

    name = "trl"
    title = "TRL"
    version = "1.16"
    frameworks = ("trl", "deepspeed")
    loads = True
    reads_back = True
    says: ClassVar = TRAINER_SAYS | MODEL_SAYS | {"objective", "offload", "freeze"}
    axes: ClassVar = FSDP_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        recipe = job.recipe
        check_eight_bits(recipe, self.name)
        values, left, becomes = write_arguments(job)
        script = "dpo" if recipe.compares else "sft"
        files, start = [File(name=NAME, data=values, checked=True)], f"trl {script} --config {NAME}"
        key = "options.trl" if uses_deepspeed(job) else "options.version"
        becomes |= {**become_sharded(job), key: TILED}
        if look_up(recipe, key) != TILED:
            left[key] = f"TRL {self.version} makes its loss from tiles of the logits"
        if _reenters(job):
            becomes["options.reentrant"] = True
            if not recipe.options.get("reentrant"):
                left["options.reentrant"] = "false: TRL's are, of adapters in ZeRO-3"
        if job.world > 1 or uses_deepspeed(job):
            config, more = write_launch(job)
            left |= more
            files.append(File(name=LAUNCH, data=config, checked=True))
            start = f"{launch(job)} -m trl.scripts.{script} --config {NAME}"
            if uses_deepspeed(job):
                files.append(write_deepspeed(job, left))
        elif recipe.offload != "none":
            left["offload"] = f"{recipe.offload}: of FSDP alone"
        needs = find_needs(
            recipe, attention=values.get("attn_implementation", ""), optim=values["optim"],
        )  # fmt: skip
        return Draft(
            files=tuple(files), left=left, start=start, becomes=becomes, needs=needs,
            notes=read_notes(job.data, job.recipe.objective),
        )  # fmt: skip


def _reenters(job: Job) -> bool:
    """Whether TRL makes blocks reentrant whatever its file says (trainer/sft_trainer)."""
    recipe = job.recipe
    third = uses_deepspeed(job) and recipe.parallel.zero == 3
    return third and recipe.method in ADAPTED and recomputes(job)[0]


def write_arguments(job: Job) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The file's keys, what they cannot say, and what is in its place."""
    recipe = job.recipe
    optimizer, left, becomes = write_optimizer(job)
    recompute, blocks, all_blocks = recomputes(job)
    attention, kernel, instead = find_attention(job, lays_out=True)
    liger, unsaid, plain = write_liger(recipe, "use_liger_kernel", loss=False)
    left |= blocks | kernel | unsaid
    becomes |= all_blocks | instead | plain
    values: dict[str, Any] = {
        "model_name_or_path": job.weights,
        "dtype": weights_dtype(recipe),
        **attention,
        **_data(job),
        "max_length": recipe.sequence_length,
        **(_pairs(recipe) if recipe.compares else {"packing": recipe.packing}),
        **write_steps(job),
        "gradient_checkpointing": recompute and not shards(job),
        "gradient_checkpointing_kwargs": {
            "use_reentrant": reenters(job, left, sharded=shards(job)),
        },
        **write_precision(recipe),
        **optimizer,
        **liger,
        **_adapter(recipe, left),
        "output_dir": "outputs",
        "report_to": "none",
    }
    return values, left, becomes


def _data(job: Job) -> dict[str, Any]:
    """A name on the hub, or files that `datasets` loads by their kind."""
    data, recipe, task = job.data, job.recipe, job.plan.request.task
    refuse_weights(data, "trl")
    own = write_conversations(
        task, "trl", template="chat_template_path", learns={"all": {"completion_only_loss": False}}
    )
    if not data.here:
        return {"dataset_name": data.named, **own}
    refuse_shapes(data, ("messages", "conversations", "answers", "text"), recipe.objective, "trl")
    values: dict[str, Any] = {
        "datasets": [
            {"path": load_with(part), "data_files": as_patterns(part), "split": "train"}
            for part in data.parts
        ]
    }
    talks = not recipe.compares and {"messages", "conversations"} & {*data.shapes}
    if talks and task.learns != "all":
        values["assistant_only_loss"] = True  # as memfit's own step: of what assistants wrote
    return values | own


def _pairs(recipe: Recipe) -> dict[str, Any]:
    """DPOConfig's own, whose losses are named as memfit's.

    Without a second model the reference is the one without its adapter.
    """
    refuse_loss(recipe, {"dpo": tuple(find_objective("dpo").loss_types)}, "trl")
    tau = recipe.preference.tau
    return {
        "loss_type": [recipe.preference.loss_type],
        "beta": recipe.preference.beta,
        "label_smoothing": recipe.preference.label_smoothing,
        **({"discopop_tau": tau} if tau else {}),
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
    bits = find_bits(recipe)
    if bits == 4:
        values |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": recipe.base_format,
            "use_bnb_nested_quant": doubles_scales(recipe),
        }
        if recipe.parallel.dp_shard > 1:  # FSDP cuts tensors of one dtype alone
            values["bnb_4bit_quant_storage"] = recipe.compute_dtype
    elif bits == 8:
        values["load_in_8bit"] = True
    elif recipe.method in ADAPTED and is_quantised(recipe.base_format):
        left["base_format"] = f"{recipe.base_format}: TRL has bitsandbytes' 4 and 8 bits"
    return values


def _whole(alpha: float, left: dict[str, str]) -> int:
    """TRL reads alpha as a whole number."""
    if alpha != int(alpha):
        left["lora.alpha"] = f"{alpha}: a whole number here"
    return int(alpha)


exports.register("trl")(Trl())
