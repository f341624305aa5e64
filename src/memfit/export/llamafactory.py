"""LLaMA-Factory's YAML."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export import Draft, Job, exports
from memfit.export._files import File
from memfit.export._hf import (
    FOUR_BIT,
    FSDP_AXES,
    MODEL_SAYS,
    TRAINER_SAYS,
    check_eight_bits,
    doubles_scales,
    drops_dropout,
    find_attention,
    recomputes,
    reenters,
    says_method,
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
from memfit.plan.frameworks._peft import WIDE, copies_wide, saved_modules
from memfit.recipe import ADAPTED, Recipe

NAME = "llamafactory.yaml"
STAGES = {"pretrain": "pt", "sft": "sft", "dpo": "dpo"}
KERNELS = {"sdpa": "sdpa", "flash_attention_2": "fa2", "eager": "disabled"}


@final
class LlamaFactory(Trains):
    """`llamafactory-cli train llamafactory.yaml`."""

    name = "llamafactory"
    title = "LLaMA-Factory"
    version = "0.9.5"
    framework = "hf-trainer"  # which LLaMA-Factory builds on
    says: ClassVar = (
        TRAINER_SAYS | MODEL_SAYS
        | {"objective", "offload", "freeze.last_blocks", "options.compares", "options.copies_dtype"}
    )  # fmt: skip
    axes: ClassVar = FSDP_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        check_eight_bits(job.recipe, self.name)
        values, left, becomes = write_arguments(job)
        files, start = [], f"llamafactory-cli train {NAME}"
        if uses_deepspeed(job):
            files.append(write_deepspeed(job, left))
            values["deepspeed"] = files[0].name
            start = f"{_torchrun(job)} {start}"
        elif job.world > 1:
            config, more = write_launch(job)
            left |= more
            becomes |= become_sharded(job)
            files.append(File(name=LAUNCH, data=config))
            start = f"{launch(job)} src/train.py {NAME}"
        elif job.recipe.offload != "none":
            left["offload"] = f"{job.recipe.offload}: of FSDP or DeepSpeed"
        files.insert(0, File(name=NAME, data=values))
        return Draft(files=tuple(files), left=left, start=start, becomes=becomes)


def _torchrun(job: Job) -> str:
    """What its launcher takes from the environment; without a port each machine picks its own."""
    words = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={job.per_node}"
    if job.nodes > 1:
        words += f' NNODES={job.nodes} NODE_RANK="$RANK" MASTER_ADDR="$MASTER_ADDR"'
        words += " MASTER_PORT=29500"
    return words


def write_arguments(job: Job) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The file's keys, what they cannot say, and what then happens."""
    recipe = job.recipe
    optimizer, left = write_optimizer(recipe)
    attention, kernel = find_attention(recipe)
    again, blocks = recomputes(job)
    precision, more = write_precision(recipe)
    left |= kernel | blocks | more | says_method(recipe, ("full", *ADAPTED, "freeze"))
    left |= drops_dropout(recipe)
    if job.own and recipe.weights == "random":
        left["weights"] = "random: LLaMA-Factory loads a model's weights"
    if recipe.precision == "bf16":
        precision["pure_bf16"] = True
    becomes: dict[str, Any] = {}
    loaded = {"bf16-mixed": "bf16", "bf16": "bf16", "fp16-mixed": "fp16"}.get(recipe.precision)
    if recipe.method in ADAPTED and recipe.base_format in ("fp32", "bf16", "fp16"):
        becomes = {"base_format": loaded or "fp32"}
        if recipe.base_format != becomes["base_format"]:
            left["base_format"] = f"{recipe.base_format}: weights are of the computed dtype"
        else:
            becomes = {}
    values: dict[str, Any] = {
        "model_name_or_path": job.weights,
        "flash_attn": KERNELS[attention],
        "stage": STAGES[recipe.objective],
        **_pairs(recipe, left),
        "do_train": True,
        **_method(recipe, left, becomes),
        "disable_gradient_checkpointing": not again or shards(job),
        "use_reentrant_gc": reenters(job, left, sharded=shards(job)),
        "dataset": job.data,
        "template": "default",
        "cutoff_len": recipe.sequence_length,
        "packing": recipe.packing,
        "neat_packing": recipe.packing and recipe.objective == "sft",
        **write_steps(recipe),
        **optimizer,
        **precision,
        "output_dir": "outputs",
        "report_to": "none",
    }
    if recipe.prefers:
        becomes["options.compares"] = "llamafactory"
        if (whose := recipe.options.get("compares", "llamafactory")) != "llamafactory":
            left["options.compares"] = f"{whose}: LLaMA-Factory compares pairs itself"
    return values, left, becomes


def _pairs(recipe: Recipe, left: dict[str, str]) -> dict[str, Any]:
    if not recipe.prefers:
        return {}
    if recipe.preference.reference == "precomputed":
        instead = "the adapter is off" if recipe.method in ADAPTED else "it loads a second model"
        left["preference.reference"] = f"precomputed: LLaMA-Factory has none, {instead} instead"
    return {
        "pref_loss": "sigmoid",
        "pref_beta": recipe.preference.beta,
        "dpo_label_smoothing": recipe.preference.label_smoothing,
    }


def _method(recipe: Any, left: dict[str, str], becomes: dict[str, Any]) -> dict[str, Any]:
    kind = "lora" if recipe.method in ADAPTED else recipe.method
    if kind not in ("lora", "freeze"):
        kind = "full"
    values: dict[str, Any] = {
        "finetuning_type": kind,
    }
    if recipe.method == "freeze":
        values["freeze_trainable_layers"] = recipe.freeze.last_blocks
        values["freeze_extra_modules"] = "norm,lm_head"
        if recipe.freeze.patterns:
            left["freeze.patterns"] = f"{list(recipe.freeze.patterns)}: whole blocks are named"
    if recipe.method in ADAPTED:
        targets = list(recipe.lora.targets)
        values |= {
            "lora_rank": recipe.lora.rank,
            "lora_alpha": int(recipe.lora.alpha),
            "lora_dropout": recipe.lora.dropout,
            **write_adapter_kind(recipe),
            "lora_target": "all" if targets == ["all-linear"] else ",".join(targets),
            **_copies(recipe, left, becomes),
        }
        if recipe.lora.alpha != int(recipe.lora.alpha):
            left["lora.alpha"] = f"{recipe.lora.alpha}: a whole number here"
    if recipe.base_format in (*FOUR_BIT, "int8"):
        values["quantization_bit"] = 8 if recipe.base_format == "int8" else 4
        values["quantization_method"] = "bnb"
        becomes["options.prepare_kbit"] = False
        if recipe.options.get("prepare_kbit"):
            left["options.prepare_kbit"] = "true: LLaMA-Factory casts nothing up"
    if recipe.base_format in FOUR_BIT:
        values["quantization_type"] = recipe.base_format
        values["double_quantization"] = doubles_scales(recipe)
    if recipe.base_format == "int4":
        left["base_format"] = "int4: a model of GPTQ is named, not quantised"
    return values


def _copies(recipe: Recipe, left: dict[str, str], becomes: dict[str, Any]) -> dict[str, Any]:
    saved = saved_modules(recipe)
    if not saved:
        return {}
    if recipe.framework != "deepspeed" and recipe.precision.endswith("-mixed"):
        becomes["options.copies_dtype"] = WIDE
        if not copies_wide(recipe):
            left["options.copies_dtype"] = "base: LLaMA-Factory trains copies in fp32"
    return {"additional_target": ",".join(saved)}


exports.register("llamafactory")(LlamaFactory())
