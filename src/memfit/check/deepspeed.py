"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import Reader, Said, Taken, readers
from memfit.check._smaller import Edit, find, split
from memfit.errors import InvalidRequest

SIZES = {
    "reduce_bucket_size": "reduce_bucket_size", "allgather_bucket_size": "allgather_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_live_parameters": "max_live_parameters", "sub_group_size": "sub_group_size",
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
        for name in ("offload_optimizer", "offload_param"):
            device = zero.inside(name)("device", "none")
            if device != "none":
                raise InvalidRequest(
                    f"`zero_optimization.{name}.device: {device}` in `{taken.file}` is not"
                    " described",
                )
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


readers.register("deepspeed")(DeepSpeedReader())
