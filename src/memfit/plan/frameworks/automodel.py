"""NeMo Automodel: FSDP2, with experts spread over ranks; only its time is predicted.

Read from NVIDIA-NeMo/Automodel (docs/performance-summary.mdx, examples/llm_benchmark): weights in
bf16, linears and attention of Transformer Engine or torch, experts by one of several kernels,
pipelines that fill and drain once a local batch.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import plain_values


@final
class Automodel(Framework):
    """The benchmark recipe of pretraining, and of LoRA."""

    name = "automodel"
    title = "NeMo Automodel"
    source = "NVIDIA-NeMo/Automodel (docs/performance-summary.mdx, examples/llm_benchmark)"
    memory_unknown = "FSDP2 with Transformer Engine's and DeepEP's buffers has not been read"
    values: ClassVar = plain_values(
        precision=("bf16", "bf16-mixed", "fp8-mixed"), method=("full", "lora"),
        base_format=("bf16", "fp32"), implementation=("fused", "foreach"),
        attention=("cudnn", "flash"), compile=("none", "blocks"),
    )  # fmt: skip
    axes = (
        "dp_replicate", "dp_shard", "reshard_after_forward", "tp", "sequence_parallel", "cp",
        "pp", "virtual_pp", "ep",
    )  # fmt: skip
    knobs: ClassVar = {
        "version": Knob(default=202511, means="year and month of the code, such as 202511"),
        "experts": Knob(
            default="te", means="whose grouped products", values=("te", "gmm", "torch_mm"),
        ),
        "dispatcher": Knob(
            default="deepep", means="how tokens reach their experts",
            values=("deepep", "hybridep", "torch"),
        ),
        "linear": Knob(default="te", means="whose linears and norms", values=("te", "torch")),
        "fp8_recipe": Knob(
            default="mxfp8", means="how FP8 values are scaled", values=("mxfp8", "tensorwise"),
        ),
        "local_batch": Knob(
            default=0, means="sequences of a rank between a pipeline's filling and draining; 0: all"
        ),
        "clip": Knob(default=False, means="whether gradients are clipped (benchmarks: not)"),
    }  # fmt: skip


frameworks.register("automodel")(Automodel())
