"""llm.c: GPT-2 and GPT-3 in CUDA without a framework, bf16 with fp32 masters; its time alone.

Read from karpathy/llm.c (train_gpt2.cu, scripts/run_gpt2_*.sh): cuDNN's attention, cuBLASLt with
fused biases and GELU, a classifier that writes its gradients over the logits, ZeRO-1, gradients
reduced a block at a time during the last micro-batch's backward.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class LlmC(Framework):
    """`train_gpt2cu`."""

    name = "llm-c"
    title = "llm.c"
    source = "karpathy/llm.c (train_gpt2.cu, scripts)"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(attention=("cudnn",), loss=("fused",), recompute=("none",))
    axes = ("dp_replicate", "dp_shard", "zero")
    cuts = 1
    knobs: ClassVar = {
        "version": Knob(default=202407, means="year and month of the code, such as 202407"),
    }


frameworks.register("llm-c")(LlmC())
