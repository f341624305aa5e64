"""What the files of TRL, axolotl and LLaMA-Factory have in common, read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memfit.check import ConfigReading
from memfit.check.keys import ConfigKeys, Evaluated, Least
from memfit.check.smaller_changes import OTHER, ROUNDED, SAME, Edit, shorter, split
from memfit.core.errors import InvalidRequest
from memfit.families.shared.masks import EAGER, FLASH, SDPA
from memfit.plan.request.model_reference import find_reference

OPTIMS = {
    "adamw_torch": ("adamw", "foreach"), "adamw_torch_fused": ("adamw", "fused"),
    "adamw_hf": ("adamw", "loop"), "sgd": ("sgd", "foreach"),
    "adamw_8bit": ("adamw8bit", "fused"), "adamw_bnb_8bit": ("adamw8bit", "fused"),
    "paged_adamw_8bit": ("adamw8bit", "fused"), "paged_adamw_32bit": ("adamw", "fused"),
    "adamw_torch_8bit": ("adamw8bit", "fused"), "adamw_torch_4bit": ("adamw4bit", "fused"),
}  # fmt: skip
KERNELS = {
    "sdpa": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash",
    "kernels-community/flash-attn2": "flash", "kernels-community/flash-attn3": "flash",
    "kernels-community/vllm-flash-attn3": "flash",
    "xformers": "efficient",  # the same kernel, and keys and values for all heads
}  # fmt: skip
SINGLE_BYTE = frozenset({
    "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_8bit",
    "adamw_torch_4bit",
})  # fmt: skip
BLOCKS = "TRANSFORMER_BASED_WRAP"  # FSDP's units
EVALUATES = ("do_eval", "val_set_size", "test_datasets")  # keys by which a file asks for it, too
UNITS: dict[str, Least] = {"NO_WRAP": "step"}  # of others, what they leave of blocks' bytes
KWARGS = "gradient_checkpointing_kwargs"
# of torch's checkpoint and transformers', with what leaves memory as it is; the rest of a kind
# that is torch's own makes the checkpoint reentrant where nothing says which it is
TRANSFORMERS: dict[str, tuple[object, ...]] = {
    "every_n_layers": (1,), "offload": (False,), "selective": (False,),
}  # fmt: skip
TORCHS: dict[str, tuple[object, ...]] = {
    "preserve_rng_state": (True, False), "determinism_check": ("default", "none"),
    "debug": (False,), "early_stop": (True,),
}  # fmt: skip


def read_steps(
    taken: ConfigKeys, reading: ConfigReading, rows: tuple[str, int],
    passes: tuple[str, float] = ("num_train_epochs", 3.0),
) -> None:  # fmt: skip
    """Batch, accumulation, steps or passes over the data, seed.

    rows, passes: a tool's key for a micro-batch's rows and for epochs, each with its default.
    """
    reading.put("micro_batch", taken(*rows))
    reading.accumulation = taken("gradient_accumulation_steps", reading.accumulation)
    steps = taken("max_steps", -1)
    epochs = taken(*passes)
    if steps > 0:
        reading.put("task.steps", steps)
    else:
        reading.put("task.epochs", epochs)
    reading.put("seed", taken("seed", 42))


def read_optimizer(
    taken: ConfigKeys, reading: ConfigReading, *, key: str = "optim", schedule: str
) -> None:
    """The optimizer and its schedule; `optim` of the Trainer's names."""
    optim = taken(key, "adamw_torch_fused")
    if optim not in OPTIMS:
        taken.leave(key, optim, f"described: {', '.join(OPTIMS)}", _least_of(optim))
        optim = "sgd"  # which keeps no states
    name, implementation = OPTIMS[optim]
    paged, torchao = optim.startswith("paged"), optim == "adamw_torch_8bit"
    if reading.own and paged and name == "adamw":
        raise InvalidRequest(
            f"`{key}: {optim}` in `{taken.file}` is not in memfit's own step",
            hint="its own: paged_adamw_8bit",
        )
    if reading.own and name == "adamw8bit" and not torchao:
        name = "adamw8bit-paged" if paged else "adamw8bit-bnb"
    elif paged:
        reading.put("options.paged", True)
    elif torchao and not reading.own:
        reading.put("options.adamw8bit", "torchao")
    reading.put("optimizer.name", name)
    reading.put("optimizer.implementation", implementation)
    if name == "sgd":
        reading.put("optimizer.momentum", 0.0)
    kind = taken(schedule, "linear").removesuffix("_with_warmup")
    if kind in ("constant", "linear", "cosine"):
        reading.put("optimizer.schedule", kind)
    numbers = {
        "learning_rate": "learning_rate", "weight_decay": "weight_decay",
        "adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "eps",
        "max_grad_norm": "clip_norm", "warmup_steps": "warmup_steps",
    }  # fmt: skip
    for theirs, ours in numbers.items():
        value = taken(theirs, kind=float)
        if ours == "warmup_steps" and value is not None:
            value = int(value) if value >= 1 else None  # a share of all steps, in transformers 5
        if value is not None:
            reading.put(f"optimizer.{ours}", value)


def _least_of(optim: str) -> Least:
    """What an optimizer that is not described leaves of a step without states: those that update
    within the backward hold no gradients."""
    fused = "layerwise" in optim or "lomo" in optim
    return "weights" if fused else "step"


def stored_dtype(reading: ConfigReading, why: str) -> str:
    """Return the checkpoint's dtype; where its config has none, bfloat16 is assumed."""
    model = reading.get("model")
    config = find_reference(model).config if isinstance(model, str | dict) and model else {}
    found = config.get("dtype", config.get("torch_dtype"))
    if found is None:
        reading.assume(f"{why}: the checkpoint is taken to be stored in bfloat16")
        found = "bfloat16"
    return str(found)


def read_precision(taken: ConfigKeys, reading: ConfigReading, *, dtype: str, adapted: bool) -> None:
    """The Trainer's autocast over weights of `dtype`: float32, bfloat16 or float16."""
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if short is None:
        taken.leave("dtype", dtype, least="nothing")
        short = "bf16"
    bf16, fp16 = taken("bf16", False), taken("fp16", False)
    mixed = "bf16-mixed" if bf16 else "fp16-mixed" if fp16 else ""
    if not mixed:  # then transformers' arguments take the launcher's word
        reading.bare = "lora" if adapted else "full"
    if adapted:
        reading.put("base_format", short)
        reading.put("precision", mixed or short)
        return
    if (
        mixed and short != "fp32"
    ):  # see `check._settle_precision`: it depends on how ranks share weights
        reading.mixed, mixed = mixed, ""
    reading.put("precision", mixed or short)


def read_reentrant(taken: ConfigKeys, key: str = KWARGS, *, default: bool = False) -> bool:
    """Whether recomputed blocks are torch's reentrant checkpoints; default: where no key is."""
    if taken.data.get(key) is None:
        return default
    made = taken.inside(key)
    for name, allowed in TRANSFORMERS.items():
        made.leave_unless(name, allowed, least="states")
    bare = not made.data  # and then transformers says `use_reentrant: false`
    reentrant: bool | None = made("use_reentrant", kind=bool)
    for name, allowed in TORCHS.items():
        made.leave_unless(name, allowed, least="states")
    return not bare if reentrant is None else reentrant


def settle_reentrant(
    reading: ConfigReading, reentrant: Callable[[ConfigReading], bool], *, recomputes: bool
) -> None:
    """Set `options.reentrant` once the launcher's file is read: accelerate's FSDP does not reenter.

    reentrant: whether the trainer's own checkpoints are; recomputes: whether it has any.
    """

    def settle(reading: ConfigReading) -> None:
        if reentrant(reading) and (recomputes or reading.sharded != "fsdp"):
            reading.put("options.reentrant", True)

    reading.later.append(settle)


def put_recompute(reading: ConfigReading, *, recomputes: bool) -> None:
    """Set `recompute` from the trainer's key, unless it is off and an earlier file set it."""
    if recomputes or reading.get("recompute") is None:
        reading.put("recompute", "full" if recomputes else "none")


def put_double(reading: ConfigReading, double: bool) -> None:
    """Whether the scales of a 4-bit base are quantised, too."""
    reading.put("quantisation.double" if reading.own else "options.double_quantisation", double)


def keep_short(reading: ConfigReading) -> None:
    """What stands beside a quantised base stays in 16 bits; DeepSpeed's engine casts it anyway."""

    def settle(reading: ConfigReading) -> None:
        if reading.get("framework") != "deepspeed":
            reading.put("options.prepare_kbit", False)

    reading.later.append(settle)


def read_pairs(
    taken: ConfigKeys,
    reading: ConfigReading,
    *,
    beta: str,
    smoothing: str,
    before: str,
    drops: bool,
) -> None:
    """Direct preference optimisation as TRL's DPOTrainer does it, which counts pairs of rows.

    beta, smoothing, before: the tool's keys, `before` "" where it has none for log-probabilities
    of the reference that are computed before the first step; drops: whether it turns dropout off.
    """
    reading.put("task.objective", "dpo")
    reading.put("task.packing", False)
    reading.put("preference.beta", taken(beta, 0.1))
    reading.put("preference.label_smoothing", taken(smoothing, 0.0))
    reading.put("micro_batch", 2 * reading.get("micro_batch"))
    early = bool(before) and taken(before, False)
    adapted = reading.get("method") == "lora"
    beside = "adapter-off" if adapted else "second-model"
    reading.put("preference.reference", "precomputed" if early else beside)
    if adapted and drops:
        reading.put("lora.dropout", 0.0)


def edit_reference(data: Mapping[str, Any], before: str) -> list[Edit]:
    """The reference's log-probabilities computed first, in place of its forwards."""
    return [] if data.get(before) else [Edit({before: True}, SAME)]


def read_evaluation(taken: ConfigKeys, reading: ConfigReading, key: str, default: int) -> None:
    """Rows of an evaluation's batch, where the file asks for one; what they take, the plan knows.

    key: the tool's own of those rows, which are `default` where it is not set.
    """
    rows = taken(key, default)
    strategy = taken.data.get("eval_strategy", taken.data.get("evaluation_strategy"))
    evaluates = strategy not in (None, "no", False) or any(taken.data.get(one) for one in EVALUATES)
    taken.drop(("do_eval", "eval_strategy", "evaluation_strategy"))
    if evaluates:
        reading.evaluated = Evaluated(file=taken.file.name, key=key, rows=rows)


def read_attention(
    taken: ConfigKeys, reading: ConfigReading, kernel: Any, *, key: str = "attn_implementation"
) -> None:
    """transformers' `attn_implementation`; torch's own choice is taken to be flash.

    key: the tool's own, by which a kernel that is not described is named.
    """
    described = KERNELS if reading.own else {**KERNELS, EAGER: "flash"}
    if kernel is None:
        reading.assume("attention is transformers' default, `sdpa`: a kernel of torch's")
        kernel = SDPA
    if not isinstance(kernel, str) or kernel not in described:
        why = f"attention of this kind is not described; described: {', '.join(described)}"
        taken.leave(key, kernel, why)
        kernel = SDPA  # no kernel keeps less
    reading.put("attention", described[kernel])
    if not reading.own:
        unchanged = {EAGER: EAGER, SDPA: SDPA, "xformers": SDPA}
        reading.put("options.attn_implementation", unchanged.get(kernel, FLASH))


def settle_padding(
    reading: ConfigReading, *, multiple: bool, separate: bool, laid_out: bool = False
) -> None:
    """Set whether attention takes a mask; transformers leaves out one that is all ones.

    multiple: whether a single row is padded, too, to a multiple of some number of tokens;
    separate: whether a mask separates packed documents where the kernel cannot do it;
    laid_out: whether a batch is one row of documents, found by their positions (TRL).
    """

    def settle(reading: ConfigReading) -> None:
        if reading.own:
            return
        flash = reading.get("options.attn_implementation") == FLASH
        many = reading.count("micro_batch") > 1 or multiple
        packed = bool(reading.get("task.packing"))
        padded = not laid_out and (separate and not flash if packed else many)
        reading.put("options.padded", padded)
        reading.put("options.padding_free", laid_out)
        if laid_out and not flash:
            reading.assume(
                "the rows of a batch are laid end to end, and their documents are kept apart by a"
                f" mask of the whole batch: flash-attn needs none (`attn_implementation: {FLASH}`)"
            )
        elif padded and packed:
            reading.assume("packed documents are kept apart by a mask, as no flash-attn does it")
        elif padded:
            takes = "flash-attn is given copies without padding" if flash else "attention is given"
            reading.assume(
                f"rows differ in length and are padded, so that {takes}{'' if flash else ' a mask'}"
                " (`--set options.padded=false`: all rows are full)"
            )

    reading.later.append(settle)


def read_lora(
    taken: ConfigKeys,
    reading: ConfigReading,
    targets: Any,
    *,
    rank: str = "lora_r",
    stable: str = "use_rslora",
) -> None:
    """Rank, alpha, dropout and targets of adapters; stable: the key of alpha / sqrt(rank)."""
    if taken(stable, False):
        reading.put("lora.scaling", "rank-stabilised")
    reading.put("lora.rank", taken(rank, 16))
    reading.put("lora.alpha", taken("lora_alpha", 32.0))
    reading.put("lora.dropout", taken("lora_dropout", 0.0))
    if targets is None:
        reading.assume(
            "adapters stand at the query and value projections, as peft's default has it"
        )
        return
    named = targets.split(",") if isinstance(targets, str) else targets
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InvalidRequest(f"targets of adapters in `{taken.file}` are names, not `{targets}`")
    reading.put("lora.targets", [name.strip() for name in named])


def read_copies(taken: ConfigKeys, reading: ConfigReading, key: str) -> bool:
    """Whether modules are copied to be trained whole beside adapters: peft's `modules_to_save`."""
    named = taken(key, kind=object)
    names = named.split(",") if isinstance(named, str) else named
    if not names or reading.get("method") != "lora":
        return False
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"`{key}` in `{taken.file}` are names of modules, not `{named}`")
    if reading.own:
        raise InvalidRequest(
            f"`{key}: {named}` in `{taken.file}` is not in memfit's own step: beside adapters it"
            " trains no module whole"
        )
    reading.put("options.modules_to_save", ",".join(name.strip() for name in names))
    return True


def read_fsdp(
    config: ConfigKeys,
    reading: ConfigReading,
    *,
    version: int = 1,
    option: Any = "",
    wrapped: bool = True,
) -> None:
    """accelerate's fsdp_config, with or without its prefix.

    version: the tool's default, 2 of transformers' arguments and 1 of accelerate's; option:
    transformers' `fsdp`, which is older than the keys; wrapped: whether blocks are units where no
    policy is set, as transformers' arguments have it.
    """

    def find(*keys: str) -> Any:
        named = [name for key in keys for name in (f"fsdp_{key}", key)]
        found = [config(name, kind=object) for name in named]
        return next((value for value in found if value is not None), None)

    stated = str(find("version") or version)
    if stated not in ("1", "2"):
        raise InvalidRequest(f"`fsdp_version: {stated}` in `{config.file}`: there are 1 and 2")
    units = str(find("auto_wrap_policy") or (BLOCKS if wrapped else "NO_WRAP")).upper()
    if units != BLOCKS:
        why = f"described: {BLOCKS}; accelerate's own default, NO_WRAP, gathers a whole model"
        config.leave("fsdp_auto_wrap_policy", units, why, UNITS.get(units, "states"))
    if stated == "2" and not reading.own:
        reading.put("options.fsdp_version", 2)
    named = [find("reshard_after_forward"), find("sharding_strategy")]
    known = {"full_shard": 3, "1": 3, "true": 3, "shard_grad_op": 2, "2": 2, "false": 2}
    policy = next((one for one in named if one is not None), None)
    for one in named:
        if one is not None and str(one).lower() not in known:
            why = "described: FULL_SHARD, SHARD_GRAD_OP"  # shards of more ranks are smaller
            config.leave("fsdp_reshard_after_forward", one, why)
            policy = "FULL_SHARD"
    if policy is None:
        policy = "SHARD_GRAD_OP" if "shard_grad_op" in str(option).lower() else "FULL_SHARD"
    reading.sharded, reading.zero = "fsdp", known[str(policy).lower()]
    if find("activation_checkpointing"):
        reading.put("recompute", "full")
    if find("offload_params", "cpu_offload") or "offload" in str(option).lower():
        reading.put("offload", "parameters")
    if (ahead := find("forward_prefetch")) and stated == "1":
        config.leave("fsdp_forward_prefetch", ahead, "a block more is gathered in the forward")


def edit_steps(
    data: Mapping[str, Any],
    *,
    micro: str,
    default: int,
    recompute: Mapping[str, Any],
    optim: str = "optim",
    length: str,
    tokens: int,
    adapted: bool,
    base: Mapping[str, Any],
    adapters: Mapping[str, Any],
) -> Iterator[list[Edit]]:
    """What the Trainer's configurations can change to save memory, in one tool's own keys.

    recompute: keys that recompute; base: that store the frozen base in 4 bits; adapters: that train
    adapters in place of all weights; length: key of the rows' length, `tokens` its default.
    """
    yield [Edit(recompute, SAME)] if any(data.get(k) != v for k, v in recompute.items()) else []
    yield split(data, micro, default)
    if not adapted:
        yield [Edit(adapters, OTHER), Edit({**adapters, **base}, OTHER)]
    elif not any(data.get(key) for key in ("load_in_4bit", "quantization_bit")):
        yield [Edit(base, ROUNDED)]
    if data.get(optim) not in SINGLE_BYTE:
        yield [Edit({optim: "adamw_8bit"}, ROUNDED)]
    yield shorter(data, length, tokens)
