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
from memfit.check.rollouts import edit_engine, find_sampling, read_rollouts
from memfit.check.smaller_changes import ROUNDED, Edit
from memfit.core.errors import InvalidRequest

EARLY = "precompute_ref_log_probs"
DPO = (
    "beta", EARLY, "label_smoothing", "max_prompt_length", "max_completion_length",
    "disable_dropout",
)  # fmt: skip
QUIET_OF_PAIRS = ("max_prompt_length", "max_completion_length", "truncation_mode")
SIGMOID = ("sigmoid", ["sigmoid"])
NEXT_TOKENS = ("nll", "chunked_nll")
FLOATS = ("float16", "bfloat16", "float32")
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
        length, tokens = "max_length", 1024
        if find_sampling(data, ConfigReading({})):
            length, tokens = "max_completion_length", 512
            yield edit_engine(data)
        yield from edit_steps(
            data,
            micro="per_device_train_batch_size",
            default=8,
            recompute={"gradient_checkpointing": True} if "gradient_checkpointing" in data else {},
            length=length,
            tokens=tokens,
            adapted=adapted,
            base={"load_in_4bit": True},
            adapters={"use_peft": True},
        )
        if str(data.get("dtype", data.get("torch_dtype", "float32"))) == "float32":
            yield [Edit({"dtype": "bfloat16"}, ROUNDED)]  # of a frozen base, or of all weights
        if length == "max_length" and any(key in data for key in DPO):
            yield edit_reference(data, EARLY)

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        sampling = find_sampling(taken.data, reading)
        pairs = not sampling and _compares(taken, reading)
        reading.put_model(taken("model_name_or_path"))
        if not reading.own:
            reading.put("framework", "trl")
        if sampling:
            read_rollouts(taken, reading, sampling)
        else:
            _leave_others(taken, reading, pairs=pairs)
            _read_rows(taken, reading)
        read_steps(taken, reading, ("per_device_train_batch_size", 8))
        read_optimizer(taken, reading, schedule="lr_scheduler_type")
        adapted = bool(taken("use_peft", False))
        reading.put("method", "lora" if adapted else "full")
        bits = _read_bits(taken, reading)
        dtype = _read_dtype(taken, reading)
        if taken.data.get("bf16") is None and not taken.data.get("fp16"):
            taken.data["bf16"] = True  # TRL's own default, of weights in 16 bits too
        base_format = reading.get("base_format")
        read_precision(taken, reading, dtype=dtype, adapted=adapted)
        if bits:
            reading.put("base_format", base_format)
        if adapted:
            if "lora_dropout" not in taken.data:
                taken.data["lora_dropout"] = 0.05  # TRL's own default
            read_lora(taken, reading, taken("lora_target_modules"))
        read_copies(taken, reading, "lora_modules_to_save")
        if pairs:
            drops = taken("disable_dropout", True)
            keys = {"beta": "beta", "smoothing": "label_smoothing", "before": EARLY}
            read_pairs(taken, reading, **keys, drops=drops)
        read_attention(taken, reading, taken("attn_implementation"))
        recomputes = taken("activation_checkpointing", taken("gradient_checkpointing", True))
        put_recompute(reading, recomputes=bool(recomputes))
        _read_reentrant(taken, reading, adapted=adapted, recomputes=recomputes)
        if option := taken("fsdp"):
            read_fsdp(taken.inside("fsdp_config"), reading, version=2, option=option)
        read_liger(
            taken, reading, "use_liger_kernel", loss=reading.get("options.version") == "0.29"
        )
        read_evaluation(taken, reading, "per_device_eval_batch_size", ROWS)
        free, parts = taken("padding_free", False), taken.data.get("packing_strategy", "bfd")
        multiple = taken("pad_to_multiple_of", 0)
        if free and not pairs:
            reading.assume("rows are full: without their padding they are as many tokens")
        packs = bool(reading.get("task.packing")) and str(parts).startswith("bfd")
        laid_out = not pairs and (bool(free) or packs)
        settle_padding(reading, multiple=bool(multiple), separate=False, laid_out=laid_out)
        length = reading.get("task.sequence_length")
        _leave_multiple(taken, multiple, length)
        if named := taken("deepspeed"):
            read_named(named, taken, reading)


def _leave_multiple(taken: ConfigKeys, multiple: int, length: Any) -> None:
    """Note rows that are padded to more tokens than they may have."""
    if multiple and isinstance(length, int) and length % multiple:
        taken.leave("pad_to_multiple_of", multiple, f"rows are longer than {length} tokens")


def _read_rows(taken: ConfigKeys, reading: ConfigReading) -> None:
    reading.put("task.objective", "sft")
    reading.put("task.sequence_length", taken("max_length", taken("max_seq_length", 1024)))
    reading.put("task.packing", taken("packing", False))


def _compares(taken: ConfigKeys, reading: ConfigReading) -> bool:
    """Whether the file is DPOTrainer's: KTO, CPO and ORPO have some of its arguments, too."""
    early = EARLY in taken.data and taken.data.get("loss_type") in SIGMOID
    return bool(early or reading.get("task.objective") == "dpo")


def _leave_others(taken: ConfigKeys, reading: ConfigReading, *, pairs: bool) -> None:
    """Note what only trainers have that are not described."""
    if not pairs:
        for key in DPO:
            why = f"DPO's with `--set task.objective=dpo`; else {ANOTHER}"
            taken.leave_unless(key, (), why, "states")
        taken.leave_unless("loss_type", NEXT_TOKENS, "the loss is another", "states")
        return
    taken.leave_unless("padding_free", (False,), least="states")
    taken.leave_unless("loss_type", SIGMOID, "DPO's own loss is described, `sigmoid`", "states")
    taken.drop(QUIET_OF_PAIRS)


def _read_reentrant(
    taken: ConfigKeys, reading: ConfigReading, *, adapted: bool, recomputes: bool
) -> None:
    """As the file says; of adapters under ZeRO-3 TRL makes them reentrant (trainer/sft_trainer)."""
    old = read_reentrant(taken)
    reentrant = read_reentrant(taken, "activation_checkpointing_kwargs", default=old)

    def whether(reading: ConfigReading) -> bool:
        forced = recomputes and adapted and reading.sharded == "deepspeed" and reading.zero == 3
        if forced and not reentrant:
            reading.assume(
                "recomputed blocks are reentrant, as TRL makes those of adapters in ZeRO-3"
            )
        return reentrant or forced

    settle_reentrant(reading, whether, recomputes=recomputes)


def _read_dtype(taken: ConfigKeys, reading: ConfigReading) -> str:
    """TRL's own default is float32; `auto` and null are the checkpoint's (from_pretrained)."""
    named = [key for key in ("dtype", "torch_dtype") if key in taken.data]
    stated = [taken.data[key] for key in named]
    dtype: str = taken("dtype", taken("torch_dtype", "float32"))
    if not stated or stated[0] not in (None, "auto"):
        return dtype
    return stored_dtype(reading, f"`{named[0]}: {'null' if stated[0] is None else 'auto'}`")


def _read_bits(taken: ConfigKeys, reading: ConfigReading) -> int:
    """bitsandbytes' 4 or 8 bits of the base; 0 where it is not quantised."""
    kind, double = taken("bnb_4bit_quant_type", "nf4"), taken("use_bnb_nested_quant", False)
    storage = taken("bnb_4bit_quant_storage", "uint8")  # how the same bytes are wrapped
    if taken("load_in_4bit", False):
        reading.put("base_format", kind)
        put_double(reading, bool(double))
        if str(storage) not in FLOATS:
            way_out = "`bnb_4bit_quant_storage: bfloat16`"
            _refuse_flat(reading, taken, f"bnb_4bit_quant_storage: {storage}", way_out)
        return 4
    if taken("load_in_8bit", False):
        reading.put("base_format", "int8")
        way_out = "`load_in_4bit: true` with `bnb_4bit_quant_storage: bfloat16`"
        _refuse_flat(reading, taken, "load_in_8bit: true", way_out)
        return 8
    return 0


def _refuse_flat(reading: ConfigReading, taken: ConfigKeys, key: str, way_out: str) -> None:
    """Raise InvalidRequest where FSDP1 shards the file's base, which it flattens: floats alone."""

    def settle(reading: ConfigReading) -> None:
        if reading.sharded == "fsdp" and reading.get("options.fsdp_version") != 2:
            raise InvalidRequest(
                f"`{key}` in `{taken.file}` beside FSDP1, which flattens no integers: no such run"
                " starts",
                hint=f"{way_out}, or DeepSpeed's ZeRO, or no shards",
            )

    reading.later.append(settle)


readers.register("trl")(TrlReader())
