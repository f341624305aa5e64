"""Kernels that users put into Hugging Face's classes: Liger's, and losses without logits.

Source: Liger-Kernel 0.8.5 (transformers/monkey_patch.py), axolotl 0.19 (integrations/liger,
integrations/cut_cross_entropy). `bench/hf_kernels.py` runs their own code.
"""

from __future__ import annotations

from memfit.base_formats import is_quantised
from memfit.core.errors import InvalidRequest
from memfit.families import families_that, find_family
from memfit.plan.frameworks import Job, Knob
from memfit.plan.frameworks.hugging_face.peft import HEAD, copies_wide, saved_modules
from memfit.records.recipe import Recipe

KERNELS = ("rope", "rms_norm", "swiglu")
LIGER_KNOBS = {
    "liger": Knob(
        default="", means="Liger-Kernel's operations, comma-separated: rope, rms_norm, swiglu;"
        " its fused loss is `loss: chunked`",
    ),
}  # fmt: skip


def kernels_of(recipe: Recipe) -> tuple[str, ...]:
    """Liger's operations of a recipe."""
    return tuple(filter(None, str(recipe.options.get("liger", "")).split(",")))


def check_kernels(job: Job) -> None:
    """Raise InvalidRequest for kernels that are not described for the model, or for shards."""
    recipe, a = job.recipe, job.model.architecture
    kernels = kernels_of(recipe)
    wrong = [name for name in kernels if name not in KERNELS]
    if wrong:
        raise InvalidRequest(
            f"`options.liger: {wrong[0]}` is none of Liger's operations",
            hint=f"known: {', '.join(KERNELS)}",
        )
    if not kernels and recipe.loss == "plain":
        return
    what = f"`options.liger: {','.join(kernels)}`" if kernels else f"`loss: {recipe.loss}`"
    if (kernels or recipe.loss == "chunked") and not find_family(a.family).liger:
        raise InvalidRequest(
            f"{what} of `{job.model.name}` ({a.family}) is not described",
            hint=f"described for the families {', '.join(families_that('liger'))}",
        )
    if recipe.options.get("release") == "4.38":
        raise InvalidRequest(f"{what} is of later classes than `options.release: 4.38`")
    if recipe.loss != "plain":
        _check_loss(job)


def _check_loss(job: Job) -> None:
    """What losses that read the head's weight themselves need of it."""
    recipe, a = job.recipe, job.model.architecture
    loss = f"`loss: {recipe.loss}`"
    ranks, pure = recipe.parallel.dp_shard, recipe.framework == "deepspeed"
    if ranks > 1 and (not pure or recipe.parallel.zero == 3):
        raise InvalidRequest(
            f"{loss} with `parallel.dp_shard: {ranks}`: what it does to the head's shards is not"
            " described",
            hint="`loss: plain` takes more",
        )
    if a.logits_scaled or a.logit_cap or a.head_bias:
        raise InvalidRequest(
            f"{loss} of `{job.model.name}` ({a.family}), whose logits are scaled, capped or have a"
            " bias, is not described",
            hint="`loss: plain` takes more",
        )
    if recipe.loss == "fused" and _wide_head(recipe, pure):
        raise InvalidRequest(
            "`loss: fused` beside a head of fp32: cut cross-entropy reads one of 16 bits",
            hint="`precision: bf16`, `base_format: bf16`, `options.prepare_kbit: false`",
        )


def _wide_head(recipe: Recipe, pure: bool) -> bool:
    """Whether the head's weight is fp32; pure: the whole module runs in 16 bits."""
    if pure:
        return False
    if recipe.method == "full":
        return recipe.precision not in ("bf16", "fp16")
    if copies_wide(recipe) and HEAD.endswith(saved_modules(recipe)):
        return True
    quantised = is_quantised(recipe.base_format)
    return recipe.base_format == "fp32" or (quantised and bool(recipe.options.get("prepare_kbit")))
