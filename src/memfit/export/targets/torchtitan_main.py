"""torchtitan's configuration as its main branch reads it (August 2026)."""

from __future__ import annotations

from typing import ClassVar, final

from memfit.export.target import Draft, Job, Target, exports
from memfit.export.targets.torchtitan_shared import AXES, SAYS, write_module


@final
class TorchtitanMain(Target):
    """After 0.3.0 tokens are counted, and pipelines have micro-batches of their own."""

    name = "torchtitan-main"
    title = "torchtitan"
    version = "b5bcd76 (main)"
    frameworks = ("torchtitan",)
    reads_back = True
    says: ClassVar = SAYS
    axes: ClassVar = AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        recipe = job.recipe
        length = recipe.sequence_length
        lines = [
            f"c.training.num_tokens_per_microbatch_per_dp_rank = {recipe.micro_batch * length}",
            f"c.training.num_tokens_per_train_step = {recipe.global_batch * length}",
            f"c.training.max_context_length = {length}",
        ]
        if recipe.parallel.pp > 1:
            lines.append(f"c.parallelism.num_pp_microbatches = {recipe.accumulation}")
        return write_module(job, lines)


exports.register("torchtitan-main")(TorchtitanMain())
