"""LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import ConfigReading, Reader, read_named, readers
from memfit.check.hugging_face import (
    edit_steps,
    keep_short,
    put_double,
    put_recompute,
    read_attention,
    read_copies,
    read_evaluation,
    read_lora,
    read_optimizer,
    read_pairs,
    read_precision,
    read_steps,
    settle_padding,
    settle_reentrant,
    stored_dtype,
)
from memfit.check.kernels import read_liger
from memfit.check.keys import ConfigKeys, Least
from memfit.check.keys.llamafactory import MOVED, STILL
from memfit.check.smaller_changes import Edit
from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks.hugging_face.peft import WIDE

LLAMA_FACTORY = "llamafactory"  # of `options.compares`
UNTRAINED = ("export_dir", "infer_backend", "do_predict")
ROWS = 8  # of an evaluation's batch, transformers' own default
KERNELS = {"sdpa": "sdpa", "fa2": "flash_attention_2", "disabled": "eager", "auto": None}


@final
class LlamaFactoryReader(Reader):
    """Trainable weights in fp32 unless `pure_bf16`; frozen ones of the computed dtype."""

    name: ClassVar = "llamafactory"
    title: ClassVar = "LLaMA-Factory"
    shares: ClassVar = True
    still: ClassVar = STILL
    moved: ClassVar = MOVED

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return not data.keys().isdisjoint(("finetuning_type", "cutoff_len", *UNTRAINED))

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """See `Reader.edits`."""
        off = bool(data.get("disable_gradient_checkpointing"))
        return edit_steps(
            data,
            micro="per_device_train_batch_size",
            default=8,
            recompute={"disable_gradient_checkpointing": False} if off else {},
            length="cutoff_len",
            tokens=2048,
            adapted=data.get("finetuning_type", "lora") == "lora",
            base={"quantization_bit": 4},
            adapters={"finetuning_type": "lora"},
        )

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        _refuse_untrained(taken)
        reading.put_model(taken("model_name_or_path"))
        if reading.get("framework") is None:
            reading.put("framework", "hf-trainer")
        if not reading.own:
            reading.assume("the step is transformers' Trainer's, which LLaMA-Factory builds on")
        stage = taken("stage", "sft")
        if stage not in ("sft", "pt", "dpo"):
            least: Least = "blocks" if stage in ("rm", "ppo") else "states"
            taken.leave("stage", stage, "described: sft, pt, dpo", least)
        reading.put("task.objective", "pretrain" if stage == "pt" else "sft")
        reading.put("task.sequence_length", taken("cutoff_len", 2048))
        reading.put("task.packing", taken("packing", stage == "pt"))
        neat = bool(taken("neat_packing", False))
        read_steps(taken, reading, ("per_device_train_batch_size", 8))
        read_optimizer(taken, reading, schedule="lr_scheduler_type")
        method = taken("finetuning_type", "lora")
        if method not in ("lora", "full", "freeze"):
            taken.leave("finetuning_type", method, "described: lora, full, freeze", "weights")
            method = "lora"
        reading.put("method", method)
        if method == "freeze":
            reading.put("freeze.last_blocks", taken("freeze_trainable_layers", 2))
        pure = taken.data.get("pure_bf16")
        self._precision(taken, reading, method)
        if method == "lora":
            _read_adapters(taken, reading, pure=bool(pure))
        if stage == "dpo":
            self._pairs(taken, reading)
        kernel = taken("flash_attn", "auto")
        read_attention(taken, reading, KERNELS.get(kernel, kernel), key="flash_attn")
        settle_padding(reading, multiple=stage != "pt", separate=neat)
        read_evaluation(taken, reading, "per_device_eval_batch_size", ROWS)
        recomputes = not taken("disable_gradient_checkpointing", False)
        put_recompute(reading, recomputes=recomputes)
        reentrant = taken("use_reentrant_gc", True)
        settle_reentrant(
            reading, lambda reading: reentrant and not _shares_units(reading), recomputes=recomputes
        )
        if named := taken("deepspeed"):
            precision = reading.get("precision")
            read_named(named, taken, reading)
            reading.put("precision", precision)
        read_liger(taken, reading, "enable_liger_kernel", loss=True)

    def _pairs(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        sigmoid = "DPO's own loss is described, `sigmoid`"
        taken.leave_unless("pref_loss", ("sigmoid",), sigmoid, "states")
        keys = {"beta": "pref_beta", "smoothing": "dpo_label_smoothing", "before": ""}
        read_pairs(taken, reading, **keys, drops=True)
        if not reading.own:
            reading.put("options.compares", LLAMA_FACTORY)

    def _precision(self, taken: ConfigKeys, reading: ConfigReading, method: str) -> None:
        pure = taken("pure_bf16", False)
        low = pure or taken.data.get("bf16")
        dtype = "bfloat16" if low else "float16" if taken.data.get("fp16") else ""
        bits, kind = taken("quantization_bit"), taken("quantization_type", "nf4")
        double, how = taken("double_quantization", True), taken("quantization_method", "bnb")
        if pure:
            taken("bf16")
        if method == "lora":
            dtype = dtype or stored_dtype(reading, "neither `bf16` nor `fp16`")  # infer_optim_dtype
            read_precision(taken, reading, dtype=dtype, adapted=True)
        else:
            read_precision(taken, reading, dtype="bfloat16" if pure else "float32", adapted=False)
        if bits is None:
            return
        if how not in ("bnb", "bitsandbytes") or bits not in (4, 8):
            why = f"described: 4 and 8 of bnb, and this is `quantization_method: {how}`"
            taken.leave("quantization_bit", bits, why, "nothing")
            return
        reading.put("base_format", "int8" if bits == 8 else kind)
        keep_short(reading)
        if bits == 4:
            put_double(reading, bool(double))


def _read_adapters(taken: ConfigKeys, reading: ConfigReading, *, pure: bool) -> None:
    named = taken("lora_target", "all")
    read_lora(taken, reading, "all-linear" if named == "all" else named, rank="lora_rank")
    if read_copies(taken, reading, "additional_target") and not pure:
        reading.later.append(_widen_copies)


def _widen_copies(reading: ConfigReading) -> None:
    """All that is trained is fp32 (model/adapter.py); DeepSpeed's engine casts all to 16 bits."""
    if reading.get("framework") != "deepspeed":
        reading.put("options.copies_dtype", WIDE)


def _shares_units(reading: ConfigReading) -> bool:
    """Under accelerate's FSDP2 it turns reentrant checkpoints off (model_utils/checkpointing)."""
    return reading.sharded == "fsdp" and reading.get("options.fsdp_version") == 2


def _refuse_untrained(taken: ConfigKeys) -> None:
    """Raise InvalidRequest for files that train nothing."""
    for key in UNTRAINED:
        if value := taken(key, kind=object):
            raise InvalidRequest(f"`{key}: {value}` in `{taken.file}`: the file trains nothing")


readers.register("llamafactory")(LlamaFactoryReader())
