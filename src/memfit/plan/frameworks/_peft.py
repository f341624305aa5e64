"""What peft makes of a model whose bytes are not described; the time of its step may be."""

from __future__ import annotations

from memfit.errors import MemoryUnknown
from memfit.plan.frameworks import Job, Knob

APART = {
    "modules_to_save": Knob(
        default="", means="modules copied and trained whole beside the adapters, comma-separated"
    ),
}


def refuse_apart(job: Job) -> None:
    """Raise MemoryUnknown for weights of GPTQ, and for copies beside the adapters."""
    if job.recipe.base_format == "int4":
        raise MemoryUnknown("weights quantised by GPTQ (`base_format: int4`) are not described")
    if saved := job.option("modules_to_save"):
        raise MemoryUnknown(
            f"adapters beside a trained copy of other modules (`options.modules_to_save: {saved}`)"
            " are not described"
        )
