"""PaddleNLP's pretraining: Fleet's sharding, tensor and pipeline parallelism; its time alone.

Read from FlagOpen/FlagPerf (training/benchmarks/*/paddle, training/nvidia/*-paddle) for Paddle
2.5.1: weights in fp16 with fp32 masters (O2), flash attention, stages 1 and 2 of ZeRO.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import plain_values


@final
class PaddleNlp(Framework):
    """`run_pretrain.py` of GPT-3 and LLaMA."""

    name = "paddlenlp"
    title = "PaddleNLP"
    source = "FlagOpen/FlagPerf (training/nvidia/*-paddle), Paddle 2.5.1"
    memory_unknown = "Paddle's allocator and its sharding have not been read"
    values: ClassVar = plain_values(precision=("fp16-mixed", "bf16-mixed"))
    axes = ("dp_replicate", "dp_shard", "zero", "tp", "sequence_parallel", "pp", "virtual_pp")
    cuts = 1
    knobs: ClassVar = {
        "version": Knob(default=202310, means="year and month of the code, such as 202310"),
        "use_fused_rms_norm": Knob(default=True, means="one kernel a norm"),
    }


frameworks.register("paddlenlp")(PaddleNlp())
