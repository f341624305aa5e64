"""flash-attention's training folder: GPT with its fused layers under Lightning; its time alone.

Read from Dao-AILab/flash-attention (training/configs, flash_attn/models/gpt.py): fused dropout, add
and norm, fused biases and GELU in the products, a fused loss; DDP, with states cut from 760M on.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class FlashAttention(Framework):
    """`training/run.py experiment=pile/gpt3…-flash`."""

    name = "flash-attention"
    title = "flash-attention's GPT"
    source = "Dao-AILab/flash-attention (training/configs, flash_attn/models/gpt.py)"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(precision=("bf16-mixed", "fp16-mixed"), loss=("fused",))
    axes = ("dp_replicate", "dp_shard", "zero")
    cuts = 1
    knobs: ClassVar = {
        "version": Knob(default=202212, means="year and month of the code, such as 202212"),
    }


frameworks.register("flash-attention")(FlashAttention())
