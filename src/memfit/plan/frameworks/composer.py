"""Composer with llm-foundry's MPT: FSDP1, one unit a block, described for its time alone.

Read from mosaicml/llm-foundry b2a43a1 and 5e85bd6 (scripts/train/benchmarking, yamls/pretrain,
llmfoundry/models) and Composer 0.17: weights are gathered in bf16, `limit_all_gathers` keeps two
units in flight, gradients are reduced in fp32 (`DEFAULT`) or bf16 (`PURE`), the optimizer is
DecoupledAdamW, a loop over flat parameters in Python.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class Composer(Framework):
    """`scripts/train/train.py` with an MPT of learned positions and biases (GPT-2's sizes)."""

    name = "composer"
    title = "Composer with llm-foundry's MPT"
    source = "mosaicml/llm-foundry b2a43a1 (2023-10), 5e85bd6 (2024-01); Composer 0.17"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(
        precision=("bf16-mixed", "fp8-mixed", "fp16-mixed"),
        implementation=("loop",), attention=("flash", "math"),
    )  # fmt: skip
    axes = ("dp_shard", "reshard_after_forward")
    knobs: ClassVar = {
        "version": Knob(default=202310, means="year and month of the code, such as 202401"),
        "attn_impl": Knob(
            default="triton", means="whose fused attention: Triton's, or flash-attn's",
            values=("triton", "flash"),
        ),
        "mixed_precision": Knob(
            default="DEFAULT", means="dtype of reduced gradients: fp32 (DEFAULT) or bf16 (PURE)",
            values=("DEFAULT", "PURE"),
        ),
        "norm_type": Knob(
            default="low_precision_layernorm", means="the norms' dtype: bf16 or autocast's fp32",
            values=("low_precision_layernorm", "layernorm"),
        ),
    }  # fmt: skip


frameworks.register("composer")(Composer())
