"""The step of `transformers.Trainer`, with peft's adapters and bitsandbytes' bases.

Source: transformers 5.23, peft 0.21, accelerate 1.15, bitsandbytes 0.50.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import frameworks
from memfit.plan.frameworks.hugging_face.step import HfFramework, hf_knobs, shared_values


@final
class HfTrainer(HfFramework):
    """One process a device, with a whole model (DDP) or a share (FSDP1, through accelerate)."""

    name = "hf-trainer"
    title = "the step of transformers' Trainer"
    source = "transformers 5.23, peft 0.21, accelerate 1.15, bitsandbytes 0.50"
    values: ClassVar = shared_values() | {"offload": ("none", "parameters")}
    knobs: ClassVar = hf_knobs()


frameworks.register("hf-trainer")(HfTrainer())
