"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import ConfigReading, Reader, readers
from memfit.check.keys import ConfigKeys
from memfit.check.keys.deepspeed import MOVED, STILL
from memfit.check.smaller_changes import Edit, find, split
from memfit.core.errors import InvalidRequest
from memfit.export.targets.deepspeed import SIZES
from memfit.plan.frameworks.deepspeed import SQUARED

HOST = ("none", "cpu")
OFFLOAD = tuple(
    f"zero_optimization.{key}"
    for key in ("offload_optimizer.device", "offload_param.device", "stage")
)
# elements up to which weights stay whole, and are kept for their next use, as is described
MOST = {
    f"stage3_{key}": most for key, most in
    (("param_persistence_threshold", 10**6), ("max_reuse_distance", 10**9))
}  # fmt: skip
ALIAS = "stage3_"  # names are taken without it, too (`populate_by_name`)
OF_STAGE_3 = frozenset(key for key in (*SIZES.values(), *MOST) if key.startswith(ALIAS))
SCHEDULES = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "WarmupLR": "constant"}


@final
class DeepSpeedReader(Reader):
    """ZeRO's stage and sizes; what is `auto` is the trainer's."""

    name: ClassVar = "deepspeed"
    title: ClassVar = "DeepSpeed"
    still: ClassVar = STILL
    moved: ClassVar = MOVED
    launches: ClassVar = True

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """States and weights on the host; later stages of ZeRO; smaller pieces of the batch where
        the file says their size."""
        stage = find(data, "zero_optimization.stage") or 0
        yield edit_offload(data, stage, OFFLOAD)
        yield [Edit({"zero_optimization.stage": later}) for later in range(stage + 1, 4)]
        if "train_micro_batch_size_per_gpu" in data:
            yield split(data, "train_micro_batch_size_per_gpu", 1)

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        zero = taken.inside("zero_optimization")
        for name in [name for name in zero.data if f"{ALIAS}{name}" in OF_STAGE_3]:
            zero.data.setdefault(f"{ALIAS}{name}", zero.data.pop(name))
        stage = zero("stage", 0)
        reading.put("framework", "deepspeed")
        reading.sharded, reading.zero = ("deepspeed", stage) if stage else ("", 3)
        self._offload(zero, reading, stage)
        if zero("overlap_comm", False):
            reading.put("options.overlap_comm", True)
        _sizes(zero, reading)
        for key, most in MOST.items():
            if (size := zero(key, 0.0)) > most:
                zero.leave(key, size, f"up to {most:,} elements are described")
        for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
            section = taken.inside(name)
            if section("enabled") is True:
                reading.put("precision", precision)
        micro = taken("train_micro_batch_size_per_gpu", kind=int)
        if micro is not None:
            reading.put("micro_batch", micro)
        reading.accumulation = taken("gradient_accumulation_steps", reading.accumulation)
        clip = taken("gradient_clipping", kind=float)
        if clip is not None:
            reading.put("optimizer.clip_norm", clip)
        self._optimizer(taken, reading)
        self._schedule(taken.inside("scheduler"), reading)

    def _offload(self, zero: ConfigKeys, reading: ConfigReading, stage: int) -> None:
        """States on the host, and weights beside them; what waits on a disk is not described."""
        devices: list[str] = []
        for name in ("offload_optimizer", "offload_param"):
            made = zero.inside(name)
            device = made("device", "none")
            ratio = made("ratio", 1.0)
            if device not in HOST or ratio != 1.0:
                key, value = ("ratio", ratio) if device in HOST else ("device", device)
                why = "what waits on a disk, or in part, is not described"
                made.leave(key, value, why, "step" if key == "ratio" else "nothing")
                device = "cpu"  # a share that stays on the device is more
            devices.append(device)
        if zero("cpu_offload", False):  # before 2021
            devices[0] = "cpu"
        put_offload(reading, stage, *devices, taken=zero)

    def _schedule(self, made: ConfigKeys, reading: ConfigReading) -> None:
        """Set the schedule, which takes no memory, where memfit has its kind."""
        kind, params = made("type", ""), made.inside("params")
        if kind in SCHEDULES:
            reading.put("optimizer.schedule", SCHEDULES[kind])
        if (steps := params("warmup_num_steps", kind=int)) is not None:
            reading.put("optimizer.warmup_steps", steps)
        if kind != "WarmupLR" and (steps := params("total_num_steps", kind=int)):
            reading.put("task.steps", steps)
        params("total_num_steps")

    def _optimizer(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        if not taken.data.get("optimizer"):
            return
        made = taken.inside("optimizer")
        kind = made("type")
        if kind not in ("Adam", "AdamW"):
            made.leave("type", kind, "described: Adam, AdamW", "weights")
        params = made.inside("params")
        foreach = params("torch_adam", False)
        reading.put("optimizer.name", "adamw")
        reading.put("optimizer.implementation", "foreach" if foreach else "fused")
        names = {"lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay"}
        for theirs, ours in names.items():
            if (value := params(theirs, kind=float)) is not None:
                reading.put(f"optimizer.{ours}", value)
        if (betas := params("betas", kind=tuple[float, float])) is not None:
            reading.put("optimizer.beta1", betas[0])
            reading.put("optimizer.beta2", betas[1])


def edit_offload(data: Mapping[str, Any], stage: int, keys: tuple[str, ...]) -> list[Edit]:
    """States on the host, then weights, too, which are of stage 3; keys: of both, and of the
    stage."""
    states, weights, which = keys
    keys_set: dict[str, Any] = {}
    found: list[Edit] = []
    for key in (states, weights):
        if find(data, key) != "cpu":
            keys_set = {**keys_set, key: "cpu"}
            if key == weights and stage < 3:
                keys_set[which] = 3
            found.append(Edit(keys_set))
    return found if stage else []


def _sizes(zero: ConfigKeys, reading: ConfigReading) -> None:
    """Elements of buckets, and of what is gathered or updated at once."""
    for ours, theirs in SIZES.items():
        if zero.data.get(theirs) == "auto" and ours in SQUARED:
            reading.put(f"options.{ours}", 0)
        size = zero(theirs, kind=float)
        if size is None:
            continue
        least = 1 if ours in SQUARED else 0  # of which `auto` is 0
        if not least <= size < 2**63:
            raise InvalidRequest(
                f"`zero_optimization.{theirs}: {size:g}` in `{zero.file}`: a number of elements",
                hint=f"a whole number, {least} or more",
            )
        reading.put(f"options.{ours}", int(size))


def put_offload(
    reading: ConfigReading, stage: int, states: str, weights: str, *, taken: ConfigKeys
) -> None:
    """What DeepSpeed keeps on the host; states, weights: `none` or `cpu`; taken: who says it."""
    if weights == "cpu" and stage != 3:
        reading.assume(f"weights on the host are of ZeRO's stage 3: in stage {stage} they stay")
        weights = "none"
    if weights == "cpu" != states:
        why = (
            f"with `offload_optimizer: {states}` it is not described: states on the device of"
            " weights on the host"
        )
        taken.leave("offload_param", weights, why, "nothing")
        weights = "none"
    if "cpu" in (states, weights):
        reading.put("offload", "parameters" if weights == "cpu" else "optimizer")


readers.register("deepspeed")(DeepSpeedReader())
