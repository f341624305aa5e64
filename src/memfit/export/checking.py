"""The command with which `memfit check` reads an export's files back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.core.wording import as_yaml
from memfit.export.settle import OF_TASK, look_up
from memfit.plan.frameworks import find_framework
from memfit.plan.request.wording import restate
from memfit.records import to_data

if TYPE_CHECKING:
    from memfit.export.target import Draft, Job, Target

READ = (".yaml", ".yml", ".json", ".py")
# of a launcher's, what its script says, and a step's memory depends on
OF_SCRIPT = (
    "method", "base_format", "precision", "attention", "recompute", "loss", "micro_batch",
    "optimizer.name", "optimizer.implementation", "task.sequence_length", "task.packing",
    "task.objective", "task.global_batch", "lora.rank", "lora.targets", "lora.dropout",
    "preference.reference", "offload", "compile",
)  # fmt: skip


def find_check(job: Job, draft: Draft, target: Target, left: Mapping[str, str]) -> tuple[str, ...]:
    """Its words; () for a target whose files nothing reads back."""
    if not target.reads_back:
        return ()
    # the trainer's file and the launcher's; what they name is found beside them
    named = [file.name for file in draft.files if file.checked]
    hardware = job.plan.request.hardware
    words = ["memfit", "check", *named, "--device", job.recipe.device, "--count", str(job.per_node)]
    if limit := job.plan.request.limits.memory:
        words += ["--memory", limit]
    keys: dict[str, Any] = {}
    if job.nodes > 1:
        keys["hardware.nodes"] = job.nodes
    if hardware.network:
        keys["hardware.network"] = hardware.network
    if target.launches:
        keys |= _of_script(job, target)
    elif not job.recipe.model.source:
        keys["model"] = to_data(job.plan.request.model)
    if job.recipe.allocator:
        keys["allocator"] = job.recipe.allocator
    for key, value in keys.items():
        words += ["--set", f"{key}={as_yaml(value)}"]
    return tuple(words)


def _of_script(job: Job, target: Target) -> dict[str, Any]:
    """What the launcher's file does not say."""
    stated = restate(job.plan)
    keys: dict[str, Any] = {"model": to_data(stated.model)}
    if stated.framework not in ("hf-trainer", "deepspeed"):
        keys["framework"] = stated.framework
    for key in OF_SCRIPT:
        ours = key.removeprefix("task.") if key.removeprefix("task.") in OF_TASK else key
        if ours not in target.says:
            value = look_up(stated, key)
            if value not in ("auto", ()):
                keys[key] = to_data(value)
    knobs = find_framework(stated.framework).knobs
    for key, value in stated.options.items():
        if f"options.{key}" not in target.says and value != knobs[key].default:
            keys[f"options.{key}"] = value
    return keys
