"""How the attention of Hugging Face's classes runs in a trainer's step, and the knobs of it.

Source: transformers 5.23 (masking_utils.py: a 2D mask of ones is left out, and without one
documents are found by positions that begin anew), trl 1.16 and 0.29 (trainer/sft_trainer.py: the
collator; `packing_strategy` of `bfd` is `padding_free`).
"""

from __future__ import annotations

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.families import find_family
from memfit.families.shared.masks import EAGER, FLASH, SDPA, Masking
from memfit.plan.frameworks import Job, Knob
from memfit.plan.frameworks.hugging_face.pairs import TILED
from memfit.records.recipe import Recipe

AUTO = "auto"
MASK_KNOBS = {
    "padded": Knob(
        default=AUTO, means="rows of a batch differ in length, which attention is told by a mask"
        " (auto: of rows that are not packed)", values=(AUTO, True, False),
    ),
    "padding_free": Knob(
        default=AUTO, means="rows of a batch are laid end to end, their documents found by"
        " positions (auto: TRL's packed rows of `objective: sft`)", values=(AUTO, True, False),
    ),
    "attn_implementation": Knob(
        default=SDPA, means="transformers': torch's kernels, scores written out, or flash-attn's",
        values=(SDPA, EAGER, FLASH),
    ),
}  # fmt: skip


def masking_of(job: Job) -> Masking | None:
    """Return how the class's attention runs; None of transformers 4.38, which made all masks."""
    recipe, device = job.recipe, job.device
    if recipe.options.get("release") == "4.38":
        return None
    implementation = str(recipe.options.get("attn_implementation", SDPA))
    laid_out = is_laid_out(recipe)
    own = find_family(job.model.architecture.family).attention_class
    return Masking(
        implementation=EAGER if own.only_eager and implementation == SDPA else implementation,
        own=own,
        padded=is_padded(recipe) and not laid_out,
        laid_out=laid_out,
        kernel=recipe.attention,
        platform=device.platform,
        capability=device.capability,
    )


def is_padded(recipe: Recipe) -> bool:
    """Whether some row of a batch is longer than another: auto, where rows are not packed."""
    # a recipe of the corpus names no knob that came after it was measured
    stated = recipe.options.get("padded", False)
    if stated != AUTO:
        return bool(stated)
    return recipe.micro_batch > 1 and not recipe.packing


def is_laid_out(recipe: Recipe) -> bool:
    """Whether a batch is one row of documents, as TRL's SFTTrainer packs by its default."""
    stated = recipe.options.get("padding_free", False)
    if stated != AUTO:
        return bool(stated)
    return _packs_with_trl(recipe) and recipe.objective == "sft"


def _packs_with_trl(recipe: Recipe) -> bool:
    trl = recipe.framework == "trl" or recipe.options.get("trl") == TILED
    return trl and recipe.packing


def lay_out(job: Job) -> Job:
    """Return the same job with its batch in the shape that attention takes."""
    recipe = job.recipe
    if recipe.micro_batch == 1 or not is_laid_out(recipe):
        return job
    one = replace(recipe, micro_batch=1, sequence_length=recipe.tokens)
    return replace(job, recipe=one)


def check_masks(job: Job) -> None:
    """Raise InvalidRequest for pairs that are laid end to end."""
    if job.recipe.prefers and is_laid_out(job.recipe):
        raise InvalidRequest(
            "`options.padding_free: true` with `objective: dpo`: pairs are compared row by row, and"
            " TRL's DPOTrainer pads them",
            hint="leave `options.padding_free` on auto",
        )


def describe_masks(recipe: Recipe) -> tuple[str, ...]:
    """Describe what `auto` became where it gives attention more."""
    options = recipe.options
    if options.get("padding_free") == AUTO and is_laid_out(recipe):
        how = "which flash-attn is told without a mask"
        if options.get("attn_implementation") != FLASH:
            how = (
                f"told by a mask of {recipe.tokens} x {recipe.tokens} tokens"
                f" (`options.attn_implementation: {FLASH}` needs none)"
            )
        return (f"packed rows are laid end to end as TRL does it, their documents {how}",)
    if options.get("padding_free") == AUTO and _packs_with_trl(recipe):
        rows = "packed rows are cut without regard to documents, TRL's `packing_strategy: wrapped`"
        return (f"{rows} (`bfd`, which keeps them apart: `options.padding_free: true`)",)
    if options.get("padded") == AUTO and is_padded(recipe):
        takes = "flash-attn is given copies without padding"
        if options.get("attn_implementation") != FLASH:
            takes = "attention is given a mask"
        rows = "rows differ in length and are padded, so that"
        return (f"{rows} {takes} (`options.padded: false`: all rows are full)",)
    return ()
