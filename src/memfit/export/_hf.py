"""What TRL, axolotl and LLaMA-Factory have in common: the arguments of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from memfit.errors import InvalidRequest
from memfit.export import Job
from memfit.export._files import OPTIMIZER_SAYS
from memfit.export._peak import BITSANDBYTES
from memfit.recipe import ADAPTED, Recipe

Values = dict[str, Any]
Left = dict[str, str]

TRAINER_SAYS = frozenset({
    "precision", *OPTIMIZER_SAYS, "recompute_blocks", "attention", "micro_batch", "accumulation",
    "steps", "seed", "options.paged", "options.adamw8bit", "options.fsdp_version",
    "options.reentrant", "options.modules_to_save",
})  # fmt: skip
MODEL_SAYS = frozenset({
    "method", "lora.rank", "lora.alpha", "lora.dropout", "lora.targets", "lora.scaling",
    "base_format", "sequence_length", "packing", "weights",
    "options.double_quantisation", "quantisation.double",
    "parallel.reshard_after_forward", "parallel.zero", "preference",
})  # fmt: skip
FSDP_AXES = frozenset({"dp_replicate", "dp_shard"})
FOUR_BIT = ("nf4", "fp4")
QUANTISED = (*FOUR_BIT, "int8")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def find_optim(recipe: Recipe) -> tuple[str, Left]:
    """The Trainer's `optim`, and what of ours it does not say."""
    optimizer = recipe.optimizer
    left: Left = {}
    own = recipe.framework == "memfit"
    made = optimizer.implementation
    paged = bool(recipe.options.get("paged"))
    if optimizer.name == "adamw" and paged:
        return "paged_adamw_32bit", left
    if optimizer.name == "adamw":
        if made == "loop":
            left["optimizer.implementation"] = "loop: the Trainer's adamw_torch is foreach"
        return ("adamw_torch_fused" if made == "fused" else "adamw_torch"), left
    if own and optimizer.name in BITSANDBYTES:
        return ("paged_adamw_8bit" if BITSANDBYTES[optimizer.name] else "adamw_8bit"), left
    torchao = own or recipe.options.get("adamw8bit") == "torchao"
    if optimizer.name == "adamw4bit" or (optimizer.name == "adamw8bit" and torchao):
        return f"adamw_torch_{optimizer.name.removeprefix('adamw')}", left
    if optimizer.name == "adamw8bit":
        if made != "fused":
            left["optimizer.implementation"] = f"{made}: bitsandbytes has one of its own"
        return ("paged_adamw_8bit" if paged else "adamw_8bit"), left
    if optimizer.name == "sgd":
        if optimizer.momentum:
            left["optimizer.momentum"] = f"{optimizer.momentum}: the Trainer's sgd has none"
        if made != "foreach":
            left["optimizer.implementation"] = f"{made}: the Trainer's sgd is foreach"
        return "sgd", left
    left["optimizer.name"] = f"{optimizer.name}: none of the Trainer's; adamw_torch_fused is set"
    return "adamw_torch_fused", left


def find_schedule(recipe: Recipe) -> str:
    """The Trainer's `lr_scheduler_type`."""
    optimizer = recipe.optimizer
    warm = optimizer.schedule == "constant" and optimizer.warmup_steps
    return "constant_with_warmup" if warm else optimizer.schedule


def write_optimizer(recipe: Recipe) -> tuple[Values, Left]:
    """The optimizer and its schedule."""
    optimizer = recipe.optimizer
    optim, left = find_optim(recipe)
    values = {
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": find_schedule(recipe),
        "warmup_steps": optimizer.warmup_steps,
        "optim": optim,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.clip_norm,
    }
    return values, left


def write_steps(recipe: Recipe) -> Values:
    """Batch, accumulation, length and seed."""
    return {
        "per_device_train_batch_size": count_examples(recipe),
        "gradient_accumulation_steps": recipe.accumulation,
        "max_steps": recipe.steps,
        "seed": recipe.seed,
    }


def count_examples(recipe: Recipe) -> int:
    """Of a micro-batch: rows, or pairs of them, which TRL's DPOTrainer counts."""
    return recipe.micro_batch // 2 if recipe.prefers else recipe.micro_batch


def drops_dropout(recipe: Recipe) -> Left:
    """Files of pairs that cannot keep TRL's DPOTrainer from turning dropout off."""
    if recipe.prefers and recipe.method in ADAPTED and recipe.lora.dropout:
        return {"lora.dropout": f"{recipe.lora.dropout}: TRL's DPOTrainer turns dropout off"}
    return {}


def check_eight_bits(recipe: Recipe, tool: str) -> None:
    """Raise InvalidRequest for bitsandbytes' 8-bit weights that ranks would share."""
    shards = recipe.parallel.dp_shard > 1 and recipe.framework != "deepspeed"
    if recipe.base_format == "int8" and shards:
        raise InvalidRequest(
            f"`base_format: int8` with `parallel.dp_shard: {recipe.parallel.dp_shard}` cannot be"
            f" written for `{tool}`: FSDP flattens no integers, and bitsandbytes stores 4 bits"
            " alone as another dtype",
            hint="`base_format: nf4`, or `parallel: {dp_replicate: N}`",
        )


def write_precision(recipe: Recipe) -> tuple[Values, Left]:
    """The Trainer's autocast; the dtype of the weights is the model's."""
    known = {
        "bf16-mixed": (True, False), "fp16-mixed": (False, True),
        "bf16": (False, False), "fp32": (False, False),
    }  # fmt: skip
    left = {}
    if recipe.precision not in known:
        left["precision"] = f"{recipe.precision}: the Trainer's autocast has bf16 and fp16"
    bf16, fp16 = known.get(recipe.precision, (True, False))
    return {"bf16": bf16, "fp16": fp16}, left


def weights_dtype(recipe: Recipe) -> str:
    """The dtype that weights are loaded in: of the base, or of what is trained."""
    if recipe.method in ADAPTED:
        coded = recipe.base_format in QUANTISED
        return recipe.compute_dtype if coded else recipe.frozen_dtype
    return recipe.trainable_dtype


def recomputes(job: Job) -> tuple[bool, Left]:
    """All blocks or none; a recipe's first n are said to be left."""
    recipe, layers = job.recipe, job.architecture.layers
    left: Left = {}
    if 0 < recipe.recompute_blocks < layers:
        left["recompute_blocks"] = f"{recipe.recompute_blocks} of {layers}: all blocks or none"
    if recipe.recompute_blocks and recipe.recompute != "full":
        left["recompute_blocks"] = f"{recipe.recompute}: whole blocks are recomputed, or none"
    return recipe.recompute_blocks > 0, left


def reenters(job: Job, left: Left, *, sharded: bool) -> bool:
    """Whether the trainer's checkpoints are torch's reentrant ones; sharded: by FSDP, which makes
    its own."""
    asked = bool(job.recipe.options.get("reentrant"))
    if asked and sharded:
        left["options.reentrant"] = "true: accelerate's FSDP recomputes without reentering"
    return asked and not sharded


def find_attention(recipe: Recipe) -> tuple[str, Left]:
    """transformers' `attn_implementation`."""
    if recipe.attention in ("flash", "varlen"):
        return ("flash_attention_2" if recipe.packing else "sdpa"), {}
    if recipe.attention == "eager":
        return "eager", {}
    return "sdpa", {"attention": f"{recipe.attention}: sdpa takes the kernel that torch prefers"}


def write_zero(job: Job) -> Left:
    """What of `zero` and resharding FSDP cannot say: it cuts weights, or gradients and states."""
    parallel = job.recipe.parallel
    if parallel.dp_shard > 1 and parallel.zero == 1:
        return {"parallel.zero": "1: FSDP cuts gradients too (2), and weights (3)"}
    return {}


def doubles_scales(recipe: Recipe) -> bool:
    """Whether the scales of a 4-bit base are quantised, too."""
    return bool(recipe.options.get("double_quantisation", recipe.quantisation.double))


def write_adapter_kind(recipe: Recipe, prefix: str = "") -> Values:
    """peft's switches of what is more than LoRA; prefix: the tool's, of their names."""
    switches = {"use_dora": recipe.method == "dora", "use_rslora": recipe.lora.scaling != "plain"}
    return {prefix + name: True for name, on in switches.items() if on}


def says_method(recipe: Recipe, known: tuple[str, ...]) -> Left:
    """A reason where the tool does not have the method."""
    if recipe.method in known:
        return {}
    return {"method": f"{recipe.method}: one of {', '.join(known)}; all weights are trained"}
