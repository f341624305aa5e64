"""TinyLlama's pretraining: lit-gpt's model with fused kernels under Fabric's FSDP; its time alone.

Read from jzhang38/TinyLlama (pretrain/tinyllama.py): full shards, `limit_all_gathers`, one unit a
block, flash attention 2, fused norms, rotary positions, SwiGLU and loss.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class TinyLlama(Framework):
    """`pretrain/tinyllama.py`."""

    name = "tinyllama"
    title = "TinyLlama's pretraining"
    source = "jzhang38/TinyLlama (pretrain/tinyllama.py)"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(
        recompute=("none",), loss=("fused",), implementation=("foreach",)
    )
    axes = ("dp_shard",)
    knobs: ClassVar = {
        "version": Knob(default=202309, means="year and month of the code, such as 202309"),
    }


frameworks.register("tinyllama")(TinyLlama())
