"""TRL's arguments, and those of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import ConfigReading, Reader, read_named, readers
from memfit.check.hugging_face import (
    edit_reference,
    edit_steps,
    put_double,
    put_recompute,
    read_attention,
    read_copies,
    read_evaluation,
    read_fsdp,
    read_lora,
    read_optimizer,
    read_pairs,
    read_precision,
    read_reentrant,
    read_steps,
    settle_padding,
    settle_reentrant,
    stored_dtype,
)
from memfit.check.kernels import read_liger
from memfit.check.keys import ConfigKeys
from memfit.check.keys.trl import ANOTHER, MOVED, STILL
from memfit.check.smaller_changes import ROUNDED, Edit

EARLY = "precompute_ref_log_probs"
DPO = (
    "beta", EARLY, "label_smoothing", "max_prompt_length", "max_completion_length",
    "disable_dropout",
)  # fmt: skip
QUIET_OF_PAIRS = ("max_prompt_length", "max_completion_length", "truncation_mode")
SIGMOID = ("sigmoid", ["sigmoid"])
NEXT_TOKENS = ("nll", "chunked_nll")
ROWS = 8  # of an evaluation's batch, transformers' own default


@final
class TrlReader(Reader):
    """SFTConfig, ModelConfig, ScriptArguments; without TRL's own keys, TrainingArguments."""

    name: ClassVar = "trl"
    title: ClassVar = "TRL"
    shares: ClassVar = True
    still: ClassVar = STILL
    moved: ClassVar = MOVED

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
        if str(data.get("dtype", data.get("torch_dtype", "float32"))) == "float32":
            yield [Edit({"dtype": "bfloat16"}, ROUNDED)]  # of a frozen base, or of all weights
        if any(key in data for key in DPO):
            yield edit_reference(data, EARLY)

    def read(self, taken: ConfigKeys, said: ConfigReading) -> None:
        """See `Reader.read`."""
        pairs = _compares(taken, said)
        _leave_others(taken, said, pairs=pairs)
        said.put_model(taken("model_name_or_path"))
        if not said.own:
            said.put("framework", "trl")
        said.put("task.objective", "sft")
        said.put("task.sequence_length", taken("max_length", taken("max_seq_length", 1024)))
        said.put("task.packing", taken("packing", False))
        read_steps(taken, said, micro="per_device_train_batch_size", default=8)
        read_optimizer(taken, said, schedule="lr_scheduler_type")
        adapted = bool(taken("use_peft", False))
        said.put("method", "lora" if adapted else "full")
        bits = _read_bits(taken, said)
        dtype = _read_dtype(taken, said)
        if taken.data.get("bf16") is None and not taken.data.get("fp16"):
            taken.data["bf16"] = True  # TRL's own default, of weights in 16 bits too
        coded = said.get("base_format")
        read_precision(taken, said, dtype=dtype, adapted=adapted)
        if bits:
            said.put("base_format", coded)
        if adapted:
            if "lora_dropout" not in taken.data:
                taken.data["lora_dropout"] = 0.05  # TRL's own default
            read_lora(taken, said, taken("lora_target_modules"))
        read_copies(taken, said, "lora_modules_to_save")
        if pairs:
            drops = taken("disable_dropout", True)
            keys = {"beta": "beta", "smoothing": "label_smoothing", "before": EARLY}
            read_pairs(taken, said, **keys, drops=drops)
        read_attention(taken, said, taken("attn_implementation"))
        again = taken("activation_checkpointing", taken("gradient_checkpointing", True))
        put_recompute(said, again=bool(again))
        _read_reentrant(taken, said, adapted=adapted, again=again)
        if asked := taken("fsdp"):
            read_fsdp(taken.inside("fsdp_config"), said, version=2, asked=asked)
        read_liger(taken, said, "use_liger_kernel", loss=said.get("options.version") == "0.29")
        read_evaluation(taken, said, "per_device_eval_batch_size", ROWS)
        free, parts = taken("padding_free", False), taken.data.get("packing_strategy", "bfd")
        multiple = taken("pad_to_multiple_of", 0)
        if free and not pairs:
            said.assume("rows are full: without their padding they are as many tokens")
        packs = bool(said.get("task.packing")) and str(parts).startswith("bfd")
        laid_out = not pairs and (bool(free) or packs)
        settle_padding(said, multiple=bool(multiple), separate=False, laid_out=laid_out)
        length = said.get("task.sequence_length")
        if multiple and isinstance(length, int) and length % multiple:
            taken.leave("pad_to_multiple_of", multiple, f"rows are longer than {length} tokens")
        if named := taken("deepspeed"):
            read_named(named, taken, said)


def _compares(taken: ConfigKeys, said: ConfigReading) -> bool:
    """Whether the file is DPOTrainer's: KTO, CPO and ORPO have some of its arguments, too."""
    told = EARLY in taken.data and taken.data.get("loss_type") in SIGMOID
    return bool(told or said.get("task.objective") == "dpo")


def _leave_others(taken: ConfigKeys, said: ConfigReading, *, pairs: bool) -> None:
    """Note what only trainers have that are not described."""
    if not pairs:
        for key in DPO:
            why = f"{ANOTHER}; that a file is DPO's is said by `--set task.objective=dpo`"
            taken.leave_unless(key, (), why, "states")
        taken.leave_unless("loss_type", NEXT_TOKENS, "the loss is another", "states")
        return
    taken.leave_unless("padding_free", (False,), least="states")
    taken.leave_unless("loss_type", SIGMOID, "DPO's own loss is described, `sigmoid`", "states")
    taken.drop(QUIET_OF_PAIRS)


def _read_reentrant(taken: ConfigKeys, said: ConfigReading, *, adapted: bool, again: bool) -> None:
    """As the file says; of adapters under ZeRO-3 TRL makes them reentrant (trainer/sft_trainer)."""
    old = read_reentrant(taken)
    asked = read_reentrant(taken, "activation_checkpointing_kwargs", default=old)

    def whether(said: ConfigReading) -> bool:
        forced = again and adapted and said.sharded == "deepspeed" and said.zero == 3
        if forced and not asked:
            said.assume("recomputed blocks are reentrant, as TRL makes those of adapters in ZeRO-3")
        return asked or forced

    settle_reentrant(said, whether, again=again)


def _read_dtype(taken: ConfigKeys, said: ConfigReading) -> str:
    """TRL's own default is float32; `auto` and null are the checkpoint's (from_pretrained)."""
    named = [key for key in ("dtype", "torch_dtype") if key in taken.data]
    asked = [taken.data[key] for key in named]
    told: str = taken("dtype", taken("torch_dtype", "float32"))
    if not asked or asked[0] not in (None, "auto"):
        return told
    return stored_dtype(said, f"`{named[0]}: {'null' if asked[0] is None else 'auto'}`")


def _read_bits(taken: ConfigKeys, said: ConfigReading) -> int:
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
