"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import Reader, Said, Taken, readers
from memfit.check._hf import NOT_DESCRIBED
from memfit.check._smaller import Edit, find, split
from memfit.errors import InvalidRequest
from memfit.export.deepspeed import SIZES
from memfit.plan.frameworks.deepspeed import SQUARED

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
HOST = ("none", "cpu")
OFFLOAD = tuple(
    f"zero_optimization.{key}"
    for key in ("offload_optimizer.device", "offload_param.device", "stage")
)
# how shards are reduced, loaded and saved
QUIET_OF_ZERO = (
    "reduce_scatter", "allgather_partitions", "round_robin_gradients", "ignore_unused_parameters",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "elastic_checkpoint",
    "load_from_fp32_weights", "pin_memory", "buffer_count", "buffer_size", "fast_init",
    "pipeline_read", "pipeline_write", "nvme_path", "max_in_cpu",
)  # fmt: skip
# of a section of its own: losses' scale, and how averages are rounded
QUIET_OF_PRECISION = (
    "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
    "auto_cast", "consecutive_hysteresis",
)  # fmt: skip
QUIET_OF_STEPS = (
    "adam_w_mode", "bias_correction", "warmup_max_lr", "warmup_min_lr", "warmup_type",
    "total_num_steps", "last_batch_iteration", "cos_min_ratio", "warmup_min_ratio",
)  # fmt: skip
ALIAS = "stage3_"  # names are taken without it, too (`populate_by_name`)
OF_STAGE_3 = frozenset(
    key for key in (*SIZES.values(), *QUIET_OF_ZERO) if key.startswith(ALIAS)
)  # fmt: skip
QUANTISED = "zero_quantized_"  # weights, gradients, weights that are not trained
QUIET = (
    "train_batch_size", "steps_per_print", "wall_clock_breakdown", "memfit", "prescale_gradients",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
)  # fmt: skip
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
        """States and weights on the host; later stages of ZeRO; smaller pieces of the batch where
        the file says their size."""
        stage = find(data, "zero_optimization.stage") or 0
        yield edit_offload(data, stage, OFFLOAD)
        yield [Edit({"zero_optimization.stage": later}) for later in range(stage + 1, 4)]
        if "train_micro_batch_size_per_gpu" in data:
            yield split(data, "train_micro_batch_size_per_gpu", 1)

    def read(self, taken: Taken, said: Said) -> None:
        """See `Reader.read`."""
        zero = taken.inside("zero_optimization")
        for name in [name for name in zero.data if f"{ALIAS}{name}" in OF_STAGE_3]:
            zero.data.setdefault(f"{ALIAS}{name}", zero.data.pop(name))
        stage = zero("stage", 0)
        said.put("framework", "deepspeed")
        said.sharded, said.zero = ("deepspeed", stage) if stage else ("", 3)
        self._offload(zero, said, stage)
        for key in ("zenflow", "mics_shard_size", "zero_hpz_partition_size"):
            zero.refuse(key, (-1, 1), NOT_DESCRIBED)
        for key in [key for key in zero.data if key.startswith(QUANTISED)]:
            zero.refuse(key, (False,), NOT_DESCRIBED)
        zero.refuse("contiguous_gradients", (True,), NOT_DESCRIBED)
        if zero("overlap_comm", False):
            said.put("options.overlap_comm", True)
        for key in OTHERS:
            if asks_nothing(taken.data.get(key)):
                taken(key)
            taken.refuse(key, (), NOT_DESCRIBED)
        for key, off in OFF.items():
            taken.refuse(key, (False, {}, *off), NOT_DESCRIBED)
        _sizes(zero, said)
        for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
            section = taken.inside(name)
            if section("enabled") is True:
                said.put("precision", precision)
            section.drop(QUIET_OF_PRECISION)
        micro = taken("train_micro_batch_size_per_gpu", kind=int)
        if micro is not None:
            said.put("micro_batch", micro)
        said.accumulation = taken("gradient_accumulation_steps", said.accumulation)
        clip = taken("gradient_clipping", kind=float)
        if clip is not None:
            said.put("optimizer.clip_norm", clip)
        self._optimizer(taken, said)
        self._schedule(taken.inside("scheduler"), said)
        taken.drop(QUIET)
        zero.drop(QUIET_OF_ZERO)

    def _offload(self, zero: Taken, said: Said, stage: int) -> None:
        """States on the host, and weights beside them; what waits on a disk is not described."""
        for key in ("cpu_offload_params", "cpu_offload_param"):
            zero.refuse(key, (False,), NOT_DESCRIBED)
        devices: list[str] = []
        for name in ("offload_optimizer", "offload_param"):
            made = zero.inside(name)
            device = made("device", "none")
            ratio = made("ratio", 1.0)
            if device not in HOST or ratio != 1.0:
                key, value = ("ratio", ratio) if device in HOST else ("device", device)
                raise InvalidRequest(
                    f"`zero_optimization.{name}.{key}: {value}` in `{zero.file}` is not described"
                )
            devices.append(device)
            made.drop(QUIET_OF_ZERO)
        if zero("cpu_offload", False):  # before 2021
            devices[0] = "cpu"
        put_offload(said, stage, *devices, where=f"`zero_optimization` in `{zero.file}`")

    def _schedule(self, made: Taken, said: Said) -> None:
        """What takes no memory: of a kind that memfit has no word for, nothing is said."""
        kind, params = made("type", ""), made.inside("params")
        if kind in SCHEDULES:
            said.put("optimizer.schedule", SCHEDULES[kind])
        if (steps := params("warmup_num_steps", kind=int)) is not None:
            said.put("optimizer.warmup_steps", steps)
        if kind != "WarmupLR" and (steps := params("total_num_steps", kind=int)):
            said.put("task.steps", steps)
        params.drop(QUIET_OF_STEPS)

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
        params.drop(QUIET_OF_STEPS)


def edit_offload(data: Mapping[str, Any], stage: int, keys: tuple[str, ...]) -> list[Edit]:
    """States on the host, then weights, too, which are of stage 3; keys: of both, and of the
    stage."""
    states, weights, which = keys
    told: dict[str, Any] = {}
    found: list[Edit] = []
    for key in (states, weights):
        if find(data, key) != "cpu":
            told = {**told, key: "cpu"}
            if key == weights and stage < 3:
                told[which] = 3
            found.append(Edit(told))
    return found if stage else []


def _sizes(zero: Taken, said: Said) -> None:
    """Elements of buckets, and of what is gathered or updated at once."""
    for ours, theirs in SIZES.items():
        if zero.data.get(theirs) == "auto" and ours in SQUARED:
            said.put(f"options.{ours}", 0)
        size = zero(theirs, kind=float)
        if size is None:
            continue
        least = 1 if ours in SQUARED else 0  # of which `auto` is 0
        if not least <= size < 2**63:
            raise InvalidRequest(
                f"`zero_optimization.{theirs}: {size:g}` in `{zero.file}`: a number of elements",
                hint=f"a whole number, {least} or more",
            )
        said.put(f"options.{ours}", int(size))


def put_offload(said: Said, stage: int, states: str, weights: str, *, where: str) -> None:
    """What DeepSpeed keeps on the host; states, weights: `none` or `cpu`."""
    if weights == "cpu" and stage != 3:
        said.assume(f"weights on the host are of ZeRO's stage 3: in stage {stage} they stay")
        weights = "none"
    if weights == "cpu" != states:
        raise InvalidRequest(
            f"`offload_param: cpu` with `offload_optimizer: {states}` in {where} is not described:"
            " states on the device of weights on the host",
            hint="`offload_optimizer: cpu` beside it",
        )
    if "cpu" in (states, weights):
        said.put("offload", "parameters" if weights == "cpu" else "optimizer")


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
