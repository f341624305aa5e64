"""fms-fsdp: IBM's Llama under FSDP1 with torch.compile over the whole model; its time alone.

Read from foundation-model-stack/fms-fsdp (main_training_llama.py, fms_fsdp/policies): weights and
reduced gradients in bf16 over fp32 shards, `limit_all_gathers`, HSDP with a node as its group,
selective checkpointing of every n-th block.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class FmsFsdp(Framework):
    """`main_training_llama.py`."""

    name = "fms-fsdp"
    title = "fms-fsdp"
    source = "foundation-model-stack/fms-fsdp (main_training_llama.py, fms_fsdp/policies)"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(compile=("model", "none"))
    axes = ("dp_replicate", "dp_shard")
    knobs: ClassVar = {
        "version": Knob(default=202405, means="year and month of the code, such as 202405"),
    }


frameworks.register("fms-fsdp")(FmsFsdp())
