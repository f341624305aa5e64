"""axolotl's YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import ConfigReading, Reader, read_named, readers
from memfit.check.hugging_face import (
    edit_reference,
    edit_steps,
    keep_short,
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
)
from memfit.check.kernels import read_plugins
from memfit.check.keys import ConfigKeys
from memfit.check.keys.axolotl import MOVED, STILL
from memfit.check.smaller_changes import Edit
from memfit.core.errors import InvalidRequest
from memfit.export.targets.axolotl import LORA_KERNELS

OF_ADAPTERS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear",
    "peft_use_rslora",
)  # fmt: skip
EARLY = "precompute_ref_log_probs"


@final
class AxolotlReader(Reader):
    """Weights of the computed dtype; adapters in fp32."""

    name: ClassVar = "axolotl"
    title: ClassVar = "axolotl"
    shares: ClassVar = True
    still: ClassVar = STILL
    moved: ClassVar = MOVED

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return "base_model" in data

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """See `Reader.edits`."""
        if data.get("rl") == "dpo":
            yield edit_reference(data, EARLY)
        yield from edit_steps(
            data,
            micro="micro_batch_size",
            default=1,
            recompute={"gradient_checkpointing": True},
            optim="optimizer",
            length="sequence_len",
            tokens=512,
            adapted=bool(data.get("adapter")),
            base={"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False},
            adapters={
                "adapter": "lora",
                "lora_r": 16,
                "lora_alpha": 32,
                "lora_target_linear": True,
            },
        )

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        reading.put_model(taken("base_model"))
        if reading.get("framework") is None:
            reading.put("framework", "hf-trainer")
        if not reading.own:
            reading.assume("the step is transformers' Trainer's, which axolotl builds on")
        reading.put("task.sequence_length", taken("sequence_len", 512))
        reading.put("task.packing", taken("sample_packing", False))
        reading.put("task.objective", _objective(taken))
        rounds = taken("pad_to_sequence_len") is not False and taken.data.get("rl") is None
        read_steps(taken, reading, ("micro_batch_size", 1), ("num_epochs", 1.0))
        read_optimizer(taken, reading, key="optimizer", schedule="lr_scheduler")
        adapter = taken("adapter")
        if adapter not in (None, "lora", "qlora"):
            taken.leave("adapter", adapter, "described: lora, qlora", "weights")
        reading.put("method", "lora" if adapter else "full")
        four, eight = taken("load_in_4bit", False), taken("load_in_8bit", False)
        read_precision(taken, reading, dtype=_settle_dtype(taken), adapted=bool(adapter))
        if (four or eight) and adapter:
            # what prepare_model_for_kbit_training casts to fp32, axolotl casts back (loaders/model)
            keep_short(reading)
        if four:
            reading.put("base_format", "nf4")
            put_double(reading, double=True)
        elif eight:
            reading.put("base_format", "int8")
        # its own default, but of pairs (utils/config)
        reentrant = read_reentrant(taken, default=taken.data.get("rl") is None)
        if adapter:
            _assume_kernels(taken, reading, eight=bool(eight))
            targets = taken("lora_target_modules")
            if taken("lora_target_linear", False):
                targets = ["all-linear"]
            read_lora(taken, reading, targets, stable="peft_use_rslora")
        else:
            taken.drop(OF_ADAPTERS)  # of which there are none
        read_copies(taken, reading, "lora_modules_to_save")
        if taken.data.get("rl") == "dpo":
            self._pairs(taken, reading)
        old = "flash_attention_2" if taken("flash_attention", False) else None
        old = "sdpa" if taken("sdp_attention", False) else old
        old = "eager" if taken("eager_attention", False) else old
        read_attention(taken, reading, taken("attn_implementation", old))
        settle_padding(reading, multiple=rounds, separate=True)
        read_evaluation(taken, reading, "eval_batch_size", reading.count("micro_batch"))
        recomputes = taken("gradient_checkpointing", False, object)
        if recomputes not in (True, False):
            why = "activations that wait on the host are not described"
            taken.leave("gradient_checkpointing", recomputes, why, "states")
        put_recompute(reading, recomputes=bool(recomputes))
        settle_reentrant(reading, lambda _: reentrant, recomputes=bool(recomputes))
        self._mesh(taken, reading)
        read_plugins(taken, reading)

    def _pairs(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        taken("rl")
        sigmoid = "DPO's own loss is described, `sigmoid`"
        taken.leave_unless("dpo_loss_type", (["sigmoid"],), sigmoid, "states")
        keys = {"beta": "rl_beta", "smoothing": "dpo_label_smoothing", "before": EARLY}
        read_pairs(taken, reading, **keys, drops=True)

    def _mesh(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        version = taken("fsdp_version")
        config = taken.inside("fsdp_config")
        if (option := taken("fsdp")) or config.data:
            read_fsdp(config, reading, version=version or 1, option=option)
            flat = reading.get("options.fsdp_version") != 2 and not reading.own
            name = reading.get("optimizer.name")
            if flat and reading.get("offload") == "parameters" and name == "adamw8bit":
                raise InvalidRequest(
                    f"an 8-bit `optimizer` in `{taken.file}` beside `offload_params: true`: axolotl"
                    " starts no such run under FSDP1",
                    hint="`fsdp_version: 2` with `optimizer: adamw_torch_8bit`, or another",
                )
        taken("dp_shard_size")
        taken("dp_replicate_size")
        if named := taken("deepspeed"):
            precision = reading.get("precision")
            read_named(named, taken, reading)
            if precision is not None and reading.get("method") == "lora":
                reading.put("precision", precision)


def _settle_dtype(taken: ConfigKeys) -> str:
    """What weights are loaded as; leaves in `bf16` and `fp16` whether it is under autocast.

    `bfloat16` asks for as much as `bf16: true`; `bf16: full` and `float16` load, and autocast
    nothing (utils/config: resolve_dtype; core/builders: _configure_precision_settings).
    """
    bf16 = taken.data.get("bf16") not in (None, False, "false")
    wide, half = bool(taken("bfloat16", False)), bool(taken("float16", False))
    if half and not (bf16 or wide or taken.data.get("fp16")):
        why = "weights of fp16 that nothing autocasts are not described: `fp16: true` beside it"
        taken.leave("float16", half, why, "nothing")
    full, fp16 = taken.data.get("bf16") == "full", bool(taken.data.get("fp16"))
    taken.data["bf16"] = (bf16 and not full) or (wide and not bf16)
    taken.data["fp16"] = fp16 and not bf16
    return "bfloat16" if bf16 or wide else "float16" if fp16 else "float32"


def _assume_kernels(taken: ConfigKeys, reading: ConfigReading, *, eight: bool) -> None:
    """What axolotl 0.19 does by itself (schemas/config, check_auto_enable_lora_kernels)."""
    named = any(taken.data.get(key) is not None for key in LORA_KERNELS)
    if not (named or eight or taken.data.get("trust_remote_code")):
        reading.assume(
            f"without axolotl's LoRA kernels, which it turns on by itself: `{LORA_KERNELS[0]}:"
            " false` turns them off"
        )


def _objective(taken: ConfigKeys) -> str:
    """Texts to be completed are pretraining, whatever weights one begins with."""
    if taken("pretraining_dataset"):
        return "pretrain"
    named = taken("datasets", [])
    kinds = [one.get("type") for one in named if isinstance(one, dict)]
    return "pretrain" if kinds and all(kind == "completion" for kind in kinds) else "sft"


readers.register("axolotl")(AxolotlReader())
