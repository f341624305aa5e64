"""accelerate's launch configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit.check import ConfigReading, Reader, find_named, read_file, readers
from memfit.check.hugging_face import read_fsdp
from memfit.check.keys import ConfigKeys, effects, still
from memfit.check.keys.hugging_face import COMPILED, MOVED_OF_FSDP, ON_THE_CPU, STILL_OF_FSDP
from memfit.check.smaller_changes import Edit, find
from memfit.check.tools.deepspeed import HOST, edit_offload, put_offload
from memfit.core.errors import InvalidRequest

_MESH = "parallelism_config.parallelism_config"
AXES = ("dp_replicate", "tp", "cp", "sp")
STILL = STILL_OF_FSDP | still({
    "how processes are started and reach each other": """compute_environment machine_rank
        main_training_function main_process_port main_process_ip rdzv_backend rdzv_endpoint
        same_network gpu_ids debug enable_cpu_affinity num_cpu_threads_per_process command_file
        commands tpu_env tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_project
        ec2_instance_type profile region image_uri iam_role_name base_job_name
        py_version pytorch_version transformers_version sagemaker_inputs_file
        sagemaker_metrics_file additional_args mpirun_config""",
    "of TPUs": "downcast_bf16",
    "how weights are loaded and saved, and ranks started": " ".join(
        f"deepspeed_config.{key}" for key in (
            "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
            "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
            "gradient_clipping", "offload_optimizer_nvme_path", "offload_param_nvme_path",
        )
    ),
})  # fmt: skip
MOVED = MOVED_OF_FSDP | effects(
    {
        ("states", COMPILED): "dynamo_config dynamo_backend dynamo_mode",
        ("nothing", ON_THE_CPU): "use_cpu ipex_config use_xpu use_mps_device",
        ("nothing", "weights are stored in another way"): "fp8_config fp8_backend",
        ("nothing", "another program shares the model"): """kt_config megatron_lm_config
            sagemaker_config""",
        ("nothing", "ranks share the model in another way"): " ".join(
            ("parallelism_config", *(f"{_MESH}_{axis}_size" for axis in AXES))
        ),
        ("step", "units of experts are gathered whole"): """
            deepspeed_config.deepspeed_moe_layer_cls_names""",
    },
    off={
        **{f"{_MESH}_{axis}_size": (1,) for axis in AXES},
        "dynamo_backend": ("NO", "no"), "dynamo_config": ({"dynamo_backend": "NO"},),
    },
)  # fmt: skip
OFFLOAD = tuple(
    f"deepspeed_config.{key}"
    for key in ("offload_optimizer_device", "offload_param_device", "zero_stage")
)


@final
class AccelerateReader(Reader):
    """Processes, machines, and how the model is shared among them."""

    name: ClassVar = "accelerate"
    title: ClassVar = "accelerate"
    still: ClassVar = STILL
    moved: ClassVar = MOVED
    launches: ClassVar = True

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return "distributed_type" in data and "compute_environment" in data

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """Shards of weights and gradients too; recompute, which FSDP's plugin wraps."""
        if data.get("distributed_type") == "DEEPSPEED":
            stage = find(data, "deepspeed_config.zero_stage") or 2
            yield edit_offload(data, stage, OFFLOAD)
            yield [Edit({"deepspeed_config.zero_stage": later}) for later in range(stage + 1, 4)]
        if data.get("distributed_type") == "FSDP":
            if not find(data, "fsdp_config.fsdp_offload_params"):
                yield [Edit({"fsdp_config.fsdp_offload_params": True})]
            if find(data, "fsdp_config.fsdp_sharding_strategy") in ("SHARD_GRAD_OP", 2):
                yield [Edit({"fsdp_config.fsdp_sharding_strategy": "FULL_SHARD"})]
            if not find(data, "fsdp_config.fsdp_activation_checkpointing"):
                yield [Edit({"fsdp_config.fsdp_activation_checkpointing": True})]

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        for key, word in (("distributed_type", "NO"), ("mixed_precision", "no")):
            if taken.data.get(key) is False:  # YAML's `no`, without quotes
                taken.data[key] = word
        kind = taken("distributed_type", "NO")
        _count(taken, reading)
        mixed = taken("mixed_precision", "no")
        if mixed != "no":
            reading.launched = f"{mixed}-mixed"
            if reading.get("precision") is None:
                reading.put("precision", reading.launched)
        if kind == "FSDP":
            read_fsdp(taken.inside("fsdp_config"), reading, wrapped=False)
        elif kind == "DEEPSPEED":
            _read_deepspeed(taken.inside("deepspeed_config"), reading)
        elif kind not in ("NO", "MULTI_GPU"):
            why = "described: NO, MULTI_GPU, FSDP, DEEPSPEED"
            taken.leave("distributed_type", kind, why, "nothing")
        mesh = taken.inside("parallelism_config")
        mesh("parallelism_config_dp_shard_size")
        taken.drop(("fsdp_config", "deepspeed_config"))  # of another `distributed_type`


def _count(taken: ConfigKeys, reading: ConfigReading) -> None:
    """Set the processes, and the machines unless the command line states a number of them."""
    reading.world, machines = taken("num_processes", 1), taken("num_machines", 1)
    for key, count in (("num_processes", reading.world), ("num_machines", machines)):
        if count < 1:
            raise InvalidRequest(
                f"`{key}: {count}` in `{taken.file}`", hint="a whole number, 1 or more"
            )
    if machines > 1 and reading.get("hardware.nodes") is None:
        reading.put("hardware.nodes", machines)


def _read_deepspeed(config: ConfigKeys, reading: ConfigReading) -> None:
    if named := config("deepspeed_config_file"):
        read_file(find_named(str(named), config.file), reading)
        return
    reading.sharded, reading.zero = "deepspeed", config("zero_stage", 2)
    reading.put("framework", "deepspeed")
    devices: list[str] = []
    for key in ("offload_optimizer_device", "offload_param_device"):
        device = config(key, "none")
        if device not in HOST:
            config.leave(key, device, "what waits on a disk is not described", "nothing")
            device = "cpu"
        devices.append(device)
    put_offload(reading, reading.zero, *devices, taken=config)
    reading.accumulation = config("gradient_accumulation_steps", reading.accumulation)


readers.register("accelerate")(AccelerateReader())
