"""What TRL, axolotl and LLaMA-Factory have in common: the arguments of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from memfit.base_formats import find_base_format
from memfit.core.errors import InvalidRequest
from memfit.core.wording import as_yaml
from memfit.export.files import OPTIMIZER_SAYS
from memfit.export.target import Job
from memfit.families.capabilities.limits import own_kernels
from memfit.families.shared.masks import FLASH, SDPA
from memfit.meta.attending.kernels import heads_of, refusal, usable
from memfit.plan.frameworks.hugging_face.kernels import KERNELS, kernels_of
from memfit.plan.frameworks.hugging_face.masks import AUTO
from memfit.records.recipe import ADAPTED, Recipe

Values = dict[str, Any]
Left = dict[str, str]

TRAINER_SAYS = frozenset({
    "precision", *OPTIMIZER_SAYS, "recompute_blocks", "attention", "micro_batch", "accumulation",
    "steps", "seed", "loss", "options.liger", "options.paged", "options.adamw8bit",
    "options.attn_implementation", "options.padded", "options.padding_free",
    "options.fsdp_version", "options.reentrant", "options.modules_to_save",
})  # fmt: skip
MODEL_SAYS = frozenset({
    "method", "lora.rank", "lora.alpha", "lora.dropout", "lora.targets", "lora.scaling",
    "base_format", "sequence_length", "packing", "weights",
    "options.double_quantisation", "quantisation.double",
    "parallel.reshard_after_forward", "parallel.zero", "preference",
})  # fmt: skip
FSDP_AXES = frozenset({"dp_replicate", "dp_shard"})
UNSAID = {
    "attn_implementation": "documents of a row are kept apart by flash_attention_2",
    "padding_free": "TRL lays packed rows end to end, and no others",
    "padded": "the tool pads rows of different lengths, and those alone are given a mask",
}
NOT_QUANTISED = "a model of GPTQ is named, not quantised"


def find_bits(recipe: Recipe) -> int:
    """Bits of a base that bitsandbytes stores; 0 of any other."""
    declared = find_base_format(recipe.base_format)
    return declared.bits if declared.library == "bitsandbytes" else 0


def find_optim(recipe: Recipe) -> tuple[str, Left, Values]:
    """The Trainer's `optim`, what of ours it does not say, and what it has in its place."""
    optimizer = recipe.optimizer
    made, paged = optimizer.implementation, bool(recipe.options.get("paged"))
    only = "fused"
    if optimizer.name == "sgd":
        optim, only = "sgd", "foreach"
    elif optimizer.name == "adamw" and paged:
        optim = "paged_adamw_32bit"
    elif optimizer.name == "adamw":
        only = "foreach" if made == "foreach" else "fused"
        optim = "adamw_torch" if made == "foreach" else "adamw_torch_fused"
    elif optimizer.name == "adamw4bit" or recipe.options.get("adamw8bit") == "torchao":
        optim = f"adamw_torch_{optimizer.name.removeprefix('adamw')}"
    else:
        optim = "paged_adamw_8bit" if paged else "adamw_8bit"
    left: Left = {}
    becomes: Values = {"optimizer.implementation": only}
    if made != only:
        left["optimizer.implementation"] = f"{made}: the Trainer's {optim} is {only}"
    if optimizer.name == "sgd" and optimizer.momentum:
        left["optimizer.momentum"] = f"{optimizer.momentum}: the Trainer's sgd has none"
    return optim, left, becomes


def write_schedule(recipe: Recipe, steps: int) -> tuple[Values, Left]:
    """The Trainer's schedule and warm-up; steps: 0 where the length is passes over the data."""
    made = recipe.optimizer
    warmup: float = made.warmup(steps) if steps or not made.warmup_ratio else made.warmup_ratio
    name: str = made.schedule
    values: Values = {}
    floor = made.floor
    if name == "constant" and warmup:
        name = "constant_with_warmup"
    elif name == "cosine" and floor:
        name, values = "cosine_with_min_lr", {"min_lr_rate": floor}
    elif name == "polynomial" or (name == "linear" and floor):
        name = "polynomial"
        values = {"lr_end": floor * made.learning_rate, "power": made.power or 1.0}
    elif name == "inverse-sqrt":
        name = "inverse_sqrt"
    elif name == "wsd":
        if not steps:
            why = "wsd: the Trainer's needs the number of steps, and `task.epochs` states passes"
            return {}, {"optimizer.schedule": why}
        name = "warmup_stable_decay"
        values = {
            "num_decay_steps": made.decay(steps), "decay_type": "linear", "min_lr_ratio": floor,
        }  # fmt: skip
    kwargs = {"lr_scheduler_kwargs": values} if values else {}
    return {"lr_scheduler_type": name, **kwargs, "warmup_steps": warmup}, {}


def write_optimizer(job: Job) -> tuple[Values, Left, Values]:
    """The optimizer and its schedule; what they do not say, and what is in its place."""
    recipe, optimizer = job.recipe, job.recipe.optimizer
    optim, left, becomes = find_optim(recipe)
    schedule, unsaid = write_schedule(recipe, job.steps if job.epochs is None else 0)
    left |= unsaid
    values = {
        "learning_rate": optimizer.learning_rate,
        **schedule,
        "optim": optim,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.clip_norm,
    }
    return values, left, becomes


def write_steps(job: Job) -> Values:
    """Batch, accumulation, length and seed; passes over the data where no steps are known."""
    recipe = job.recipe
    length = {"max_steps": job.steps} if job.epochs is None else {"num_train_epochs": job.epochs}
    return {
        "per_device_train_batch_size": count_examples(recipe),
        "gradient_accumulation_steps": recipe.accumulation,
        **length,
        "seed": recipe.seed,
    }


def count_examples(recipe: Recipe) -> int:
    """Of a micro-batch: rows, or pairs of them, which TRL's DPOTrainer counts."""
    return recipe.micro_batch // 2 if recipe.prefers else recipe.micro_batch


def drops_dropout(recipe: Recipe) -> tuple[Left, Values]:
    """Files of pairs that cannot keep TRL's DPOTrainer from turning dropout off."""
    if recipe.prefers and recipe.method in ADAPTED and recipe.lora.dropout:
        why = f"{recipe.lora.dropout}: TRL's DPOTrainer turns dropout off"
        return {"lora.dropout": why}, {"lora.dropout": 0.0}
    return {}, {}


def check_eight_bits(recipe: Recipe, tool: str) -> None:
    """Raise InvalidRequest for bitsandbytes' 8-bit weights that ranks would share."""
    shards = recipe.parallel.dp_shard > 1 and recipe.framework != "deepspeed"
    base = find_base_format(recipe.base_format)
    if not base.cut_as_numbers and shards:
        raise InvalidRequest(
            f"`base_format: {base.name}` with `parallel.dp_shard: {recipe.parallel.dp_shard}`"
            f" cannot be written for `{tool}`: FSDP flattens no integers, and bitsandbytes stores"
            " 4 bits alone as another dtype",
            hint="`base_format: nf4`, or `parallel: {dp_replicate: N}`",
        )


def write_precision(recipe: Recipe) -> Values:
    """The Trainer's autocast; the dtype of the weights is the model's."""
    known = {
        "bf16-mixed": (True, False), "fp16-mixed": (False, True),
        "bf16": (False, False), "fp32": (False, False),
    }  # fmt: skip
    bf16, fp16 = known[recipe.precision]
    return {"bf16": bf16, "fp16": fp16}


def weights_dtype(recipe: Recipe) -> str:
    """The dtype that weights are loaded in: of the base, or of what is trained."""
    if recipe.method in ADAPTED:
        return recipe.frozen_dtype
    return recipe.trainable_dtype


def recomputes(job: Job) -> tuple[bool, Left, Values]:
    """All blocks or none; a recipe's first n become all of them."""
    recipe, layers = job.recipe, job.architecture.layers
    if 0 < recipe.recompute_blocks < layers:
        why = f"{recipe.recompute_blocks} of {layers}: all blocks or none"
        return True, {"recompute_blocks": why}, {"recompute_blocks": layers}
    return recipe.recompute_blocks > 0, {}, {}


def reenters(job: Job, left: Left, *, sharded: bool) -> bool:
    """Whether the trainer's checkpoints are torch's reentrant ones; sharded: by FSDP, which makes
    its own."""
    reentrant = bool(job.recipe.options.get("reentrant"))
    if reentrant and sharded:
        left["options.reentrant"] = "true: accelerate's FSDP recomputes without reentering"
    return reentrant and not sharded


def find_attention(
    job: Job, *, multiple: bool = False, lays_out: bool = False
) -> tuple[Values, Left, Values]:
    """transformers' `attn_implementation`, what it does not say, and what is in its place.

    Only flash-attention's own package separates packed documents. A class with a kernel of its own
    gets no value.
    multiple: whether the tool pads a single row, too; lays_out: whether it lays packed rows end to
    end.
    """
    recipe = job.recipe
    left: Left = {}
    becomes: Values = {}
    own = own_kernels(job.architecture)
    heads, device = heads_of(job.architecture, 0), job.device
    unsupported = "is not that of the model's class" if own else refusal(
        "flash", recipe.compute_dtype, heads, platform=device.platform, capability=device.capability
    )  # fmt: skip
    if recipe.packing and unsupported:
        left["packing"] = (
            f"true: nothing keeps documents of a row apart: flash attention {unsupported}"
        )
        becomes["packing"] = False
    packs = recipe.packing and not unsupported
    kernel = FLASH if packs else str(recipe.options.get("attn_implementation", SDPA))
    pads = not packs and (recipe.micro_batch > 1 or multiple)
    settled: Values = {
        "attn_implementation": kernel, "padded": pads, "padding_free": packs and lays_out,
    }  # fmt: skip
    for name, value in settled.items():
        if own and name == "attn_implementation":
            continue
        becomes[f"options.{name}"] = value
        if recipe.options.get(name, value) not in (value, AUTO):
            left[f"options.{name}"] = f"{as_yaml(recipe.options[name])}: {UNSAID[name]}"
    if own:
        return {}, left, becomes
    if recipe.attention != "flash":
        first = usable(
            recipe.compute_dtype, heads, platform=device.platform, capability=device.capability
        )[0]
        if kernel != SDPA or recipe.attention != first:
            left["attention"] = f"{recipe.attention}: {kernel} takes the kernel that torch prefers"
        becomes["attention"] = "flash"
    return {"attn_implementation": kernel}, left, becomes


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


def write_liger(recipe: Recipe, key: str, *, loss: bool) -> tuple[Values, Left, Values]:
    """All of Liger's kernels by one key; loss: whether its loss is among them."""
    kernels, wanted = set(kernels_of(recipe)), "chunked" if loss else "plain"
    if kernels == {*KERNELS} and recipe.loss == wanted:
        return {key: True}, {}, {}
    left: Left = {}
    becomes: Values = {}
    if kernels:
        left["options.liger"] = f"{','.join(sorted(kernels))}: `{key}` is all of Liger's, or none"
        becomes["options.liger"] = ""
    if recipe.loss != "plain":
        left["loss"] = f"{recipe.loss}: `{key}` is all of Liger's, or none"
        becomes["loss"] = "plain"
    return {}, left, becomes
