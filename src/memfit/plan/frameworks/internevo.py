"""InternEvo's hybrid ZeRO: states cut inside a group, whole weights and gradients; its time alone.

Read from InternLM/InternEvo (configs/7B_sft.py, internlm/solver/optimizer, internlm/data):
`overlap_sync_grad` reduces gradients in buckets of 512 MiB during the backward, the updated weights
are broadcast after the step, and tensor parallelism of mode `mtp` cuts no tokens.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, TimeTraits, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class InternEvo(Framework):
    """`train.py` with InternLM's decoder: a gated one with biases in its attention."""

    name = "internevo"
    time = TimeTraits(narrow_gradients=True)
    title = "InternEvo"
    source = "InternLM/InternEvo (configs/7B_sft.py, internlm/solver, internlm/data)"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(precision=("bf16-mixed", "fp16-mixed"))
    axes = ("dp_replicate", "dp_shard", "zero", "tp", "pp", "virtual_pp")
    cuts = 1
    knobs: ClassVar = {
        "version": Knob(default=202310, means="year and month of the code, such as 202310"),
        "overlap_sync_grad": Knob(default=True, means="gradients are reduced in the backward"),
        "overlap_sync_param": Knob(default=False, means="weights are sent in the next forward"),
    }


frameworks.register("internevo")(InternEvo())
