"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import Reader, Said, Taken, readers
from memfit.check._hf import NOT_DESCRIBED
from memfit.check._smaller import Edit, find, split
from memfit.errors import InvalidRequest

SIZES = {
    "reduce_bucket_size": "reduce_bucket_size", "allgather_bucket_size": "allgather_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_live_parameters": "max_live_parameters", "sub_group_size": "sub_group_size",
}  # fmt: skip
# what else changes the model, or which of its tokens and blocks run
OTHERS = (
    "compression_training", "autotuning", "data_efficiency", "progressive_layer_drop",
    "torch_autocast",
)  # fmt: skip
# of sections without `enabled`, the values that ask for nothing
OFF: dict[str, tuple[Any, ...]] = {
    "compile": ({"deepcompile": False}, {"disable": True}), "sequence_parallel_size": (1,),
    "tensor_parallel": ({"autotp_size": 0}, {"autotp_size": 1}),
}  # fmt: skip
QUIET = ("train_batch_size", "steps_per_print", "wall_clock_breakdown", "memfit")
SCHEDULES = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "WarmupLR": "constant"}


@final
class DeepSpeedReader(Reader):
    """ZeRO's stage and sizes; what is `auto` is the trainer's."""

    name: ClassVar = "deepspeed"
    title: ClassVar = "DeepSpeed"
    launches: ClassVar = True

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """Later stages of ZeRO; smaller pieces of the batch where the file says their size."""
        stage = find(data, "zero_optimization.stage") or 0
        yield [Edit({"zero_optimization.stage": later}) for later in range(stage + 1, 4)]
        if "train_micro_batch_size_per_gpu" in data:
            yield split(data, "train_micro_batch_size_per_gpu", 1)

    def read(self, taken: Taken, said: Said) -> None:
        """See `Reader.read`."""
        zero = taken.inside("zero_optimization")
        stage = zero("stage", 0)
        said.put("framework", "deepspeed")
        said.sharded, said.zero = ("deepspeed", stage) if stage else ("", 3)
        self._offload(zero, said)
        for key in ("zenflow", "mics_shard_size", "zero_hpz_partition_size"):
            zero.refuse(key, (-1, 1), NOT_DESCRIBED)
        for key in OTHERS:
            if asks_nothing(taken.data.get(key)):
                taken(key)
            taken.refuse(key, (), NOT_DESCRIBED)
        for key, off in OFF.items():
            taken.refuse(key, (False, {}, *off), NOT_DESCRIBED)
        for theirs, ours in SIZES.items():
            if (size := zero(theirs, kind=float)) is not None:
                said.put(f"options.{ours}", int(size))
        for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
            if taken.inside(name)("enabled") is True:
                said.put("precision", precision)
        micro = taken("train_micro_batch_size_per_gpu", kind=int)
        if micro is not None:
            said.put("micro_batch", micro)
        said.accumulation = taken("gradient_accumulation_steps", said.accumulation)
        clip = taken("gradient_clipping", kind=float)
        if clip is not None:
            said.put("optimizer.clip_norm", clip)
        self._optimizer(taken, said)
        self._schedule(taken.inside("scheduler"), said)
        for key in QUIET:
            taken(key)

    def _offload(self, zero: Taken, said: Said) -> None:
        """States on the host; where weights wait there, and on a disk, is not described."""
        for name, known in (("offload_optimizer", ("none", "cpu")), ("offload_param", ("none",))):
            made = zero.inside(name)
            device = made("device", "none")
            ratio = made("ratio", 1.0)
            if device not in known or ratio != 1.0:
                key, value = ("ratio", ratio) if device in known else ("device", device)
                raise InvalidRequest(
                    f"`zero_optimization.{name}.{key}: {value}` in `{zero.file}` is not described"
                )
            if device == "cpu":
                said.put("offload", "optimizer")

    def _schedule(self, made: Taken, said: Said) -> None:
        """What takes no memory: of a kind that memfit has no word for, nothing is said."""
        kind, params = made("type", ""), made.inside("params")
        if kind in SCHEDULES:
            said.put("optimizer.schedule", SCHEDULES[kind])
        if (steps := params("warmup_num_steps", kind=int)) is not None:
            said.put("optimizer.warmup_steps", steps)
        if kind != "WarmupLR" and (steps := params("total_num_steps", kind=int)):
            said.put("task.steps", steps)

    def _optimizer(self, taken: Taken, said: Said) -> None:
        if not taken.data.get("optimizer"):
            return
        made = taken.inside("optimizer")
        kind = made("type")
        if kind not in ("Adam", "AdamW"):
            raise InvalidRequest(f"`optimizer.type: {kind}` in `{taken.file}` is not described")
        params = made.inside("params")
        foreach = params("torch_adam", False)
        said.put("optimizer.name", "adamw")
        said.put("optimizer.implementation", "foreach" if foreach else "fused")
        names = {"lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay"}
        for theirs, ours in names.items():
            if (value := params(theirs, kind=float)) is not None:
                said.put(f"optimizer.{ours}", value)
        if (betas := params("betas", kind=tuple[float, float])) is not None:
            said.put("optimizer.beta1", betas[0])
            said.put("optimizer.beta2", betas[1])


def asks_nothing(section: Any) -> bool:
    """Whether a section is switched off: by its own `enabled`, that of the parts that it shares
    (compression's `shared_parameters`), or those of all its parts."""
    if not isinstance(section, dict):
        return not section
    if "enabled" in section:
        return section["enabled"] is False
    if "shared_parameters" in section:
        return asks_nothing(section["shared_parameters"])
    parts = list(section.values())
    return all(isinstance(part, dict) and asks_nothing(part) for part in parts)


readers.register("deepspeed")(DeepSpeedReader())
