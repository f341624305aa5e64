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
            again={"disable_gradient_checkpointing": False} if off else {},
            length="cutoff_len",
            tokens=2048,
            adapted=data.get("finetuning_type", "lora") == "lora",
            base={"quantization_bit": 4},
            adapters={"finetuning_type": "lora"},
        )

    def read(self, taken: ConfigKeys, said: ConfigReading) -> None:
        """See `Reader.read`."""
        _refuse_untrained(taken)
        said.put_model(taken("model_name_or_path"))
        if said.get("framework") is None:
            said.put("framework", "hf-trainer")
        if not said.own:
            said.assume("the step is transformers' Trainer's, which LLaMA-Factory builds on")
        stage = taken("stage", "sft")
        if stage not in ("sft", "pt", "dpo"):
            least: Least = "blocks" if stage in ("rm", "ppo") else "states"
            taken.leave("stage", stage, "described: sft, pt, dpo", least)
        said.put("task.objective", "pretrain" if stage == "pt" else "sft")
        said.put("task.sequence_length", taken("cutoff_len", 2048))
        said.put("task.packing", taken("packing", stage == "pt"))
        neat = bool(taken("neat_packing", False))
        read_steps(taken, said, micro="per_device_train_batch_size", default=8)
        read_optimizer(taken, said, schedule="lr_scheduler_type")
        method = taken("finetuning_type", "lora")
        if method not in ("lora", "full", "freeze"):
            taken.leave("finetuning_type", method, "described: lora, full, freeze", "weights")
            method = "lora"
        said.put("method", method)
        if method == "freeze":
            said.put("freeze.last_blocks", taken("freeze_trainable_layers", 2))
        pure = taken.data.get("pure_bf16")
        self._precision(taken, said, method)
        if method == "lora":
            _read_adapters(taken, said, pure=bool(pure))
        if stage == "dpo":
            self._pairs(taken, said)
        kernel = taken("flash_attn", "auto")
        read_attention(taken, said, KERNELS.get(kernel, kernel), key="flash_attn")
        settle_padding(said, multiple=stage != "pt", separate=neat)
        read_evaluation(taken, said, "per_device_eval_batch_size", ROWS)
        again = not taken("disable_gradient_checkpointing", False)
        put_recompute(said, again=again)
        reentrant = taken("use_reentrant_gc", True)
        settle_reentrant(said, lambda said: reentrant and not _shares_units(said), again=again)
        if named := taken("deepspeed"):
            precision = said.get("precision")
            read_named(named, taken, said)
            said.put("precision", precision)
        read_liger(taken, said, "enable_liger_kernel", loss=True)

    def _pairs(self, taken: ConfigKeys, said: ConfigReading) -> None:
        sigmoid = "DPO's own loss is described, `sigmoid`"
        taken.leave_unless("pref_loss", ("sigmoid",), sigmoid, "states")
        keys = {"beta": "pref_beta", "smoothing": "dpo_label_smoothing", "before": ""}
        read_pairs(taken, said, **keys, drops=True)
        if not said.own:
            said.put("options.compares", LLAMA_FACTORY)

    def _precision(self, taken: ConfigKeys, said: ConfigReading, method: str) -> None:
        pure = taken("pure_bf16", False)
        low = pure or taken.data.get("bf16")
        dtype = "bfloat16" if low else "float16" if taken.data.get("fp16") else ""
        bits, kind = taken("quantization_bit"), taken("quantization_type", "nf4")
        double, how = taken("double_quantization", True), taken("quantization_method", "bnb")
        if pure:
            taken("bf16")
        if method == "lora":
            dtype = dtype or stored_dtype(said, "neither `bf16` nor `fp16`")  # infer_optim_dtype
            read_precision(taken, said, dtype=dtype, adapted=True)
        else:
            read_precision(taken, said, dtype="bfloat16" if pure else "float32", adapted=False)
        if bits is None:
            return
        if how not in ("bnb", "bitsandbytes") or bits not in (4, 8):
            why = f"described: 4 and 8 of bnb, and this is `quantization_method: {how}`"
            taken.leave("quantization_bit", bits, why, "nothing")
            return
        said.put("base_format", "int8" if bits == 8 else kind)
        keep_short(said)
        if bits == 4:
            put_double(said, bool(double))


def _read_adapters(taken: ConfigKeys, said: ConfigReading, *, pure: bool) -> None:
    named = taken("lora_target", "all")
    read_lora(taken, said, "all-linear" if named == "all" else named, rank="lora_rank")
    if read_copies(taken, said, "additional_target") and not pure:
        said.later.append(_widen_copies)


def _widen_copies(said: ConfigReading) -> None:
    """All that is trained is fp32 (model/adapter.py); DeepSpeed's engine casts all to 16 bits."""
    if said.get("framework") != "deepspeed":
        said.put("options.copies_dtype", WIDE)


def _shares_units(said: ConfigReading) -> bool:
    """Under accelerate's FSDP2 it turns reentrant checkpoints off (model_utils/checkpointing)."""
    return said.sharded == "fsdp" and said.get("options.fsdp_version") == 2


def _refuse_untrained(taken: ConfigKeys) -> None:
    """Raise InvalidRequest for files that train nothing."""
    for key in UNTRAINED:
        if value := taken(key, kind=object):
            raise InvalidRequest(f"`{key}: {value}` in `{taken.file}`: the file trains nothing")


readers.register("llamafactory")(LlamaFactoryReader())
