"""accelerate's launch configuration: processes, machines, FSDP or DeepSpeed, mixed precision."""

from __future__ import annotations

import shlex
from typing import Any, ClassVar, final

from memfit.base_formats import is_quantised
from memfit.export.files import File
from memfit.export.hugging_face import FSDP_AXES, recomputes, write_precision, write_zero
from memfit.export.needs import find_needs
from memfit.export.target import Draft, Job, Target, exports

NAME = "accelerate.yaml"
SCRIPT = (
    "train.py is yours: what is not said here, such as the batch and the optimizer, it says as"
    " planned; `--to trl` writes all of it"
)
HF_STEPS = ("hf-trainer", "trl", "deepspeed")  # whose plans shard as accelerate's FSDP1
SAYS = frozenset({
    "precision", "parallel.zero", "parallel.reshard_after_forward", "offload",
    "parallel.tp", "parallel.cp", "parallel.sequence_parallel", "options.fsdp_version",
})  # fmt: skip


class Launches(Target):
    """A target that writes DeepSpeed's file beside its own, where the plan is of its step."""

    def says_of(self, job: Job) -> frozenset[str]:
        """See `Target.says_of`."""
        if not uses_deepspeed(job):
            return self.says
        from memfit.export.targets.deepspeed import SIZES

        return self.says | {"parallel.zero", *(f"options.{ours}" for ours in SIZES)}


@final
class Accelerate(Launches):
    """What starts the processes; batch, optimizer and model are the script's."""

    name = "accelerate"
    title = "accelerate"
    version = "1.15"
    frameworks = ("hf-trainer", "trl", "deepspeed")
    launches = True
    reads_back = True
    says: ClassVar = SAYS | {"recompute_blocks"}
    axes: ClassVar = FSDP_AXES | {"tp", "cp"}

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        values, left = write_launch(job)
        files = [File(name=NAME, data=values, checked=True)]
        if job.recipe.precision == "bf16" and not uses_deepspeed(job):
            # no autocast is asked for: the script loads weights of 16 bits
            left["weights in bfloat16"] = "train.py loads them so, as nothing is autocast"
        if not shards(job) and job.recipe.recompute_blocks:
            left["recompute_blocks"] = f"{job.recipe.recompute_blocks}: only FSDP wraps blocks"
        if uses_deepspeed(job):
            from memfit.export.targets.deepspeed import NAME as JSON
            from memfit.export.targets.deepspeed import write_config

            config, more = write_config(job)
            files.append(File(name=JSON, data=config))
            left |= more
        return Draft(
            files=tuple(files), left=left, start=f"{launch(job)} train.py",
            becomes=become_sharded(job) | (recomputes(job)[2] if shards(job) else {}),
            needs=find_needs(job.recipe), notes=(SCRIPT,),
        )  # fmt: skip


def launch(job: Job) -> str:
    """The command that starts every rank, without the script."""
    words = ["accelerate", "launch", "--config_file", NAME]
    if job.nodes > 1:
        return f'{shlex.join(words)} --machine_rank "$RANK" --main_process_ip "$MASTER_ADDR"'
    return shlex.join(words)


def shards(job: Job) -> bool:
    """Whether FSDP is what the file asks for."""
    p = job.recipe.parallel
    return not uses_deepspeed(job) and (p.dp_shard > 1 or p.tp > 1 or p.cp > 1)


def uses_deepspeed(job: Job) -> bool:
    """Whether the plan is of DeepSpeed's step."""
    return job.recipe.framework == "deepspeed"


def write_deepspeed(job: Job, left: dict[str, str]) -> File:
    """DeepSpeed's file beside a trainer's, which fills in the optimizer and its schedule."""
    from memfit.export.targets.deepspeed import NAME as JSON
    from memfit.export.targets.deepspeed import write_config

    config, more = write_config(job)
    # the trainer's own file says the optimizer
    left |= {key: why for key, why in more.items() if not key.startswith("optimizer.")}
    del config["optimizer"]
    config.pop("scheduler", None)
    return File(name=JSON, data=config)


def find_version(job: Job) -> int:
    """Of the FSDP that the file asks for: 1 flattens a unit's weights, 2 cuts each."""
    recipe, p = job.recipe, job.recipe.parallel
    one = recipe.framework in HF_STEPS and recipe.options.get("fsdp_version") != 2
    return 1 if one and p.tp == p.cp == 1 else 2


def become_sharded(job: Job) -> dict[str, Any]:
    """What a plan becomes in the Trainer's step for the sharding of the launch file."""
    return {"options.fsdp_version": find_version(job)} if shards(job) else {}


def write_launch(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's keys, and what of the mesh they cannot say."""
    recipe, p = job.recipe, job.recipe.parallel
    left: dict[str, str] = {}
    mixed = next((name for name, on in write_precision(recipe).items() if on), "no")
    kind = "NO" if job.world == 1 else "MULTI_GPU"
    if shards(job):
        kind = "FSDP"
    if uses_deepspeed(job):
        kind = "DEEPSPEED"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": mixed,
        "num_machines": job.nodes,
        "num_processes": job.world,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": job.device.is_cpu,
    }
    if job.nodes > 1:
        values |= {"main_process_port": 29500, "rdzv_backend": "static"}  # the address: `launch`
    if kind == "DEEPSPEED":
        from memfit.export.targets.deepspeed import NAME as JSON

        del values["mixed_precision"]  # accelerate refuses it beside a file that says it
        values["deepspeed_config"] = {
            "deepspeed_config_file": JSON, "zero3_init_flag": p.zero == 3,
        }  # fmt: skip
        return values, left
    if kind == "FSDP":
        values["fsdp_config"], more = _fsdp(job)
        left |= more
        if values["fsdp_config"]["fsdp_version"] == 2:
            values["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": p.dp_replicate,
                "parallelism_config_dp_shard_size": p.dp_shard,
                "parallelism_config_tp_size": p.tp,
                "parallelism_config_cp_size": p.cp,
            }
    elif recipe.offload != "none":
        left["offload"] = f"{recipe.offload}: of FSDP alone"
    return values, left


def _fsdp(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    recipe, p = job.recipe, job.recipe.parallel
    version = find_version(job)
    whole = p.zero == 3 and p.reshard_after_forward
    left = write_zero(job)
    policy: bool | str = whole
    if version == 1:
        policy = "FULL_SHARD" if whole else "SHARD_GRAD_OP"
        if p.dp_replicate > 1:
            policy = "HYBRID_SHARD" if whole else "HYBRID_SHARD_ZERO2"
    if p.zero == 3 and not p.reshard_after_forward:
        left["parallel.zero"] = "3 without resharding is FSDP's 2: weights stay after the forward"
    recompute, some, _ = recomputes(job)
    left |= some
    if recipe.offload not in ("none", "parameters"):
        left["offload"] = f"{recipe.offload}: FSDP offloads parameters with states, or nothing"
    if p.tp > 1 and p.sequence_parallel:
        left["parallel.sequence_parallel"] = "true: the model's own plan of tp decides"
    values = {
        "fsdp_version": version,
        "fsdp_reshard_after_forward": policy,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": recompute,
        "fsdp_offload_params": recipe.offload == "parameters",
        "fsdp_cpu_ram_efficient_loading": not is_quantised(recipe.base_format),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if version == 1:
        values["fsdp_use_orig_params"] = recipe.method == "lora"
        values["fsdp_sync_module_states"] = values["fsdp_cpu_ram_efficient_loading"]
    return values, left


exports.register("accelerate")(Accelerate())
