"""TRL's arguments, and those of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import Reader, Said, Taken, readers
from memfit.check._hf import (
    NOT_DESCRIBED,
    drop_quiet,
    edit_steps,
    put_double,
    read_attention,
    read_fsdp,
    read_lora,
    read_optimizer,
    read_pairs,
    read_precision,
    read_steps,
)
from memfit.check._smaller import ROUNDED, Edit

REFUSED = (
    "use_liger_kernel", "activation_offloading", "use_dora", "use_rslora", "torch_compile",
    "lora_modules_to_save", "gradient_checkpointing_kwargs", "activation_checkpointing",
    "neftune_noise_alpha", "auto_find_batch_size", "deepspeed",
)  # fmt: skip
# arguments of its other trainers (DPO, KTO, ORPO, GRPO, RLOO, rewards), which SFTConfig has not
OTHER_TRAINERS = (
    "rpo_alpha", "sync_ref_model", "desirable_weight", "undesirable_weight", "loss_weights",
    "center_rewards_coefficient", "num_generations", "reward_funcs", "reward_model_name_or_path",
    "use_weighting", "ld_alpha", "padding_free",
)  # fmt: skip
EARLY = "precompute_ref_log_probs"
DPO = (
    "beta", EARLY, "label_smoothing", "max_prompt_length", "max_completion_length",
    "disable_dropout",
)  # fmt: skip
QUIET_OF_PAIRS = ("max_prompt_length", "max_completion_length", "truncation_mode")
SIGMOID = ("sigmoid", ["sigmoid"])


@final
class TrlReader(Reader):
    """SFTConfig, ModelConfig, ScriptArguments; without TRL's own keys, TrainingArguments."""

    name: ClassVar = "trl"
    title: ClassVar = "TRL"

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return "per_device_train_batch_size" in data or "model_name_or_path" in data

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """See `Reader.edits`."""
        adapted = bool(data.get("use_peft"))
        yield from edit_steps(
            data,
            micro="per_device_train_batch_size",
            default=8,
            again={"gradient_checkpointing": True} if "gradient_checkpointing" in data else {},
            length="max_length",
            tokens=1024,
            adapted=adapted,
            base={"load_in_4bit": True},
            adapters={"use_peft": True},
        )
        if adapted and str(data.get("dtype", data.get("torch_dtype", "float32"))) == "float32":
            yield [Edit({"dtype": "bfloat16"}, ROUNDED)]  # of the frozen base

    def read(self, taken: Taken, said: Said) -> None:
        """See `Reader.read`."""
        pairs = _compares(taken, said)
        _refuse_others(taken, pairs=pairs)
        said.put_model(taken("model_name_or_path"))
        if not said.own:
            said.put("framework", "trl")
            said.assume(
                "the step is TRL 0.29's: since 1.0 its loss is made from tiles of the logits"
            )
        said.put("task.objective", "sft")
        said.put("task.sequence_length", taken("max_length", 1024))
        said.put("task.packing", taken("packing", False))
        read_steps(taken, said, micro="per_device_train_batch_size", default=8)
        read_optimizer(taken, said, schedule="lr_scheduler_type")
        adapted = bool(taken("use_peft", False))
        said.put("method", "lora" if adapted else "full")
        bits = _read_bits(taken, said)
        dtype = taken("dtype", taken("torch_dtype", "float32"))
        if dtype == "float32" and "bf16" not in taken.data and "fp16" not in taken.data:
            taken.data["bf16"] = True  # TRL's own default
        coded = said.get("base_format")
        read_precision(taken, said, dtype=dtype, adapted=adapted)
        if bits:
            said.put("base_format", coded)
        if adapted:
            if "lora_dropout" not in taken.data:
                taken.data["lora_dropout"] = 0.05  # TRL's own default
            read_lora(taken, said, taken("lora_target_modules"))
        if pairs:
            drops = taken("disable_dropout", True)
            keys = {"beta": "beta", "smoothing": "label_smoothing", "before": EARLY}
            read_pairs(taken, said, **keys, drops=drops)
        read_attention(taken, said, taken("attn_implementation"))
        again = taken("gradient_checkpointing", True)
        if said.get("recompute") is None or again:
            said.put("recompute", "full" if again else "none")
        if asked := taken("fsdp"):
            read_fsdp(taken("fsdp_config", {}), taken, said, version=2, asked=asked)
        for key in REFUSED:
            taken.refuse(key, (False, [], {"use_reentrant": False}), NOT_DESCRIBED)
        drop_quiet(taken)


def _compares(taken: Taken, said: Said) -> bool:
    """Whether the file is DPOTrainer's: KTO, CPO and ORPO have some of its arguments, too."""
    told = EARLY in taken.data and taken.data.get("loss_type") in SIGMOID
    return bool(told or said.get("task.objective") == "dpo")


def _refuse_others(taken: Taken, *, pairs: bool) -> None:
    """Raise InvalidRequest for what only trainers have that are not described."""
    if not pairs:
        for key in (*OTHER_TRAINERS, *DPO):
            taken.refuse(
                key, (), "TRL's SFT is described, and it has no such argument; that a file is"
                " DPO's is said by `--set task.objective=dpo`",
            )  # fmt: skip
        return
    taken.refuse("loss_type", SIGMOID, "DPO's own loss is described, `sigmoid`")
    for key in OTHER_TRAINERS:
        taken.refuse(key, (False,), NOT_DESCRIBED)
    for key in QUIET_OF_PAIRS:
        taken(key)


def _read_bits(taken: Taken, said: Said) -> int:
    """bitsandbytes' 4 or 8 bits of the base; 0 where it is not quantised."""
    kind, double = taken("bnb_4bit_quant_type", "nf4"), taken("use_bnb_nested_quant", False)
    taken("bnb_4bit_quant_storage")  # how the same bytes are wrapped
    if taken("load_in_4bit", False):
        said.put("base_format", kind)
        put_double(said, bool(double))
        return 4
    if taken("load_in_8bit", False):
        said.put("base_format", "int8")
        return 8
    return 0


readers.register("trl")(TrlReader())
