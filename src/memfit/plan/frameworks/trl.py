"""The step of TRL's `SFTTrainer`: the Trainer's, with recompute, and adapters of QLoRA in bf16.

Source: trl 1.16 (trainer/sft_trainer.py, trainer/base_config.py, kernels/chunked_logprob.py), which
makes the loss from tiles of the logits, and trl 0.29, which lets the class make it.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Knob, frameworks
from memfit.plan.frameworks.hugging_face.engines import doubt_engine
from memfit.plan.frameworks.hugging_face.pairs import BY_VERSION, TILED, WHOSE
from memfit.plan.frameworks.hugging_face.sampled import SAMPLED_KNOBS
from memfit.plan.frameworks.hugging_face.step import HfFramework, hf_knobs, shared_values
from memfit.records.recipe import Recipe


@final
class Trl(HfFramework):
    """SFTConfig's defaults: bf16, gradient checkpointing."""

    name = "trl"
    title = "the step of TRL's SFTTrainer, of its DPOTrainer, of its GRPOTrainer or RLOOTrainer"
    samples = ("grpo", "rloo")
    source = "trl 1.16 and 0.29, transformers 5.23, peft 0.21, bitsandbytes 0.50"
    values: ClassVar = shared_values() | {
        "recompute": ("full", "none"), "offload": ("none", "parameters"), "loss": ("plain",),
    }  # fmt: skip
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
        **SAMPLED_KNOBS,
    }  # fmt: skip

    def doubt(self, recipe: Recipe) -> str:
        """See `Framework.doubt`."""
        return doubt_engine(recipe) if recipe.samples else ""


frameworks.register("trl")(Trl())
