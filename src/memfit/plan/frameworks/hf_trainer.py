"""The step of `transformers.Trainer`, with peft's adapters and bitsandbytes' bases.

Source: transformers 5.23, peft 0.21, accelerate 1.15, bitsandbytes 0.50.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.errors import InvalidRequest
from memfit.ledger import Kind, Ledger
from memfit.plan.frameworks import Framework, Job, Knob, Slack, frameworks
from memfit.plan.frameworks._assembly import (
    Held,
    assemble,
    attention_kernel,
    cublas,
    run_passes,
)
from memfit.plan.frameworks._hf import (
    hf_model,
    hf_program,
    hold_parameters,
    hold_states,
    hold_update,
    shared_values,
)
from memfit.recipe import Recipe
from memfit.units import show_bytes


@final
class HfTrainer(Framework):
    """One process a device, each with a whole model; gradients are averaged by DDP."""

    name = "hf-trainer"
    title = "the step of transformers' Trainer"
    source = "transformers 5.23, peft 0.21, accelerate 1.15, bitsandbytes 0.50"
    values: ClassVar = shared_values()
    axes = ("dp_replicate",)
    knobs: ClassVar = {
        "adapter_dtype": Knob(
            default="fp32", means="dtype of adapters: peft casts those of a 16-bit base to fp32",
            values=("fp32", "base"),
        ),
        "double_quantisation": Knob(default=False, means="bnb_4bit_use_double_quant"),
        "prepare_kbit": Knob(
            default=True, means="prepare_model_for_kbit_training: what is not quantised is fp32"
        ),
        "padded": Knob(
            default=False, means="rows of a batch differ in length: attention is given a mask"
        ),
        "keeps_outputs": Knob(
            default=False, means="the loop holds the model's outputs in backward, as own loops do"
        ),
        "paged": Knob(default=False, means="paged_adamw_8bit, for `optimizer: adamw8bit`"),
    }  # fmt: skip
    slack = Slack(
        low=1.0, typical=1.04, high=1.12,
        source="bench/certify.py's replays of the allocator over steps without recompute",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        check_base(job.recipe)

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        recipe, device = job.recipe, job.device
        model = hf_model(job)
        kernel = "efficient" if recipe.options["padded"] else attention_kernel(job)
        program = hf_program(job, keeps_outputs=bool(recipe.options["keeps_outputs"]))
        simulated = run_passes(job, model, program, kernel)
        weights = hold_parameters(model, recipe)
        held = {**weights, **hold_states(model, recipe), **cublas(device)}
        if recipe.parallel.dp_replicate > 1:
            held |= _buckets(sum(w.nbytes for w in model.weights if w.trainable))
        update = hold_update(model, recipe)
        return assemble(job, simulated, load=weights, held=held, update=update)


def _buckets(nbytes: int) -> Held:
    return {
        (Kind.GRADIENTS, "buckets"): (
            nbytes, f"DDP's buckets: a copy of every gradient, {show_bytes(nbytes)}",
        )
    }  # fmt: skip


def check_base(recipe: Recipe) -> None:
    """Raise InvalidRequest for weights that no step of Hugging Face's trainers trains."""
    if recipe.method == "full" and recipe.base_format in ("nf4", "fp4", "int8"):
        raise InvalidRequest(
            f"`method: full` cannot train weights stored as `base_format: {recipe.base_format}`",
            hint="`method: lora`",
        )
    if recipe.optimizer.name == "adamw8bit" and recipe.optimizer.implementation == "foreach":
        raise InvalidRequest("bitsandbytes' optimizers have no `implementation: foreach`")


frameworks.register("hf-trainer")(HfTrainer())
