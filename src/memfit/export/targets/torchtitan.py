"""torchtitan's configuration: a Python module that torchtitan imports, of 0.3.0."""

from __future__ import annotations

from typing import ClassVar, final

from memfit.export.target import Draft, Job, Target, exports
from memfit.export.targets.torchtitan_shared import AXES, SAYS, write_module


@final
class Torchtitan(Target):
    """0.3.0 counts sequences: `local_batch_size`, `global_batch_size`, `seq_len`."""

    name = "torchtitan"
    title = "torchtitan"
    version = "0.3.0"
    frameworks = ("torchtitan",)
    reads_back = True
    says: ClassVar = SAYS
    axes: ClassVar = AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        recipe = job.recipe
        micro = recipe.accumulation if recipe.parallel.pp > 1 else 1
        lines = [
            f"c.training.local_batch_size = {recipe.micro_batch * micro}",
            f"c.training.global_batch_size = {recipe.global_batch}",
            f"c.training.seq_len = {recipe.sequence_length}",
        ]
        if recipe.parallel.pp > 1:
            lines.append(f"c.parallelism.pipeline_parallel_microbatch_size = {recipe.micro_batch}")
        return write_module(job, lines)


exports.register("torchtitan")(Torchtitan())
