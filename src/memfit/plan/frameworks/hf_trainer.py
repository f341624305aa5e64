"""The step of `transformers.Trainer`, with peft's adapters and bitsandbytes' bases.

Source: transformers 5.23, peft 0.21, accelerate 1.15, bitsandbytes 0.50.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.ledger import Ledger
from memfit.plan.frameworks import Framework, Job, Slack, frameworks
from memfit.plan.frameworks._hf import (
    check_base,
    hf_knobs,
    hf_on_host,
    predict_hf,
    shared_values,
)


@final
class HfTrainer(Framework):
    """One process a device, with a whole model (DDP) or a share (FSDP1, through accelerate)."""

    name = "hf-trainer"
    title = "the step of transformers' Trainer"
    source = "transformers 5.23, peft 0.21, accelerate 1.15, bitsandbytes 0.50"
    values: ClassVar = shared_values() | {"offload": ("none", "parameters")}
    axes = ("dp_replicate", "dp_shard", "zero")
    pairs = True
    knobs: ClassVar = hf_knobs()
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


frameworks.register("hf-trainer")(HfTrainer())
