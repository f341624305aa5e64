"""The step of TRL's `SFTTrainer`: the Trainer's, with recompute, and adapters of QLoRA in bf16.

Source: trl 1.16 (trainer/sft_trainer.py, trainer/base_config.py, kernels/chunked_logprob.py), which
makes the loss from tiles of the logits, and trl 0.29, which lets the class make it.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.ledger import Ledger
from memfit.plan.frameworks import Framework, Job, Knob, Slack, frameworks
from memfit.plan.frameworks._hf import (
    check_base,
    hf_knobs,
    hf_on_host,
    predict_hf,
    shared_values,
)
from memfit.plan.frameworks._pairs import BY_VERSION, TILED, WHOSE


@final
class Trl(Framework):
    """SFTConfig's defaults: bf16, gradient checkpointing."""

    name = "trl"
    title = "the step of TRL's SFTTrainer, or of its DPOTrainer"
    source = "trl 1.16 and 0.29, transformers 5.23, peft 0.21, bitsandbytes 0.50"
    values: ClassVar = shared_values() | {
        "recompute": ("full", "none"), "offload": ("none", "parameters"), "loss": ("plain",),
    }  # fmt: skip
    axes = ("dp_replicate", "dp_shard", "zero")
    pairs = True
    knobs: ClassVar = hf_knobs() | {
        "version": Knob(
            default=TILED, means="TRL's: 1.16 makes its loss from tiles of the logits, 0.29 whole",
            values=(TILED, "0.29"),
        ),
        "compares": Knob(
            default=BY_VERSION, means="whose DPO: TRL's (auto: of `version`), or LLaMA-Factory's",
            values=(BY_VERSION, *WHOSE),
        ),
        "adapter_dtype": Knob(
            default="auto", means="dtype of adapters: auto is fp32, and bf16 over quantised bases",
            values=("auto", "fp32", "base"),
        ),
        "prepare_kbit": Knob(
            default=False, means="prepare_model_for_kbit_training, as TRL did until 0.24"
        ),
    }  # fmt: skip
    slack = Slack(
        low=1.0, typical=1.04, high=1.12,
        source="bench/certify.py's replays of the allocator over steps without recompute",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        check_base(job)

    def on_host(self, job: Job) -> int:
        """See `Framework.on_host`."""
        return hf_on_host(job)

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        return predict_hf(job)


frameworks.register("trl")(Trl())
