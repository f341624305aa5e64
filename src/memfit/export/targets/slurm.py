"""A batch script for Slurm's `sbatch`."""

from __future__ import annotations

from typing import ClassVar, final

from memfit.export.files import ALL_AXES, File
from memfit.export.target import EVERY_KEY, Draft, Job, Target, exports
from memfit.export.targets.cloud import start_on, start_with, train_script


@final
class Slurm(Target):
    """One task a machine; it starts a process a device."""

    name = "slurm"
    title = "Slurm"
    version = ""
    says: ClassVar = EVERY_KEY
    axes: ClassVar = ALL_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        trained = start_on(job, "$SLURM_NODEID", "$MASTER_ADDR")
        options = {
            "job-name": job.name,
            "nodes": job.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": job.per_node,
            "mem": 0,
            "exclusive": None,
            "output": "%x-%j.out",
        }
        first = "#!/bin/bash\n" + "".join(
            f"#SBATCH --{key}\n" if value is None else f"#SBATCH --{key}={value}\n"
            for key, value in options.items()
        )
        text = (
            "set -euo pipefail\n"
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            "export MASTER_ADDR\n"
            "srun --kill-on-bad-exit=1 bash train.sh\n"
        )
        files = (File(name="job.sbatch", text=text, first=first), train_script(trained))
        return start_with(files, trained, "sbatch job.sbatch")


exports.register("slurm")(Slurm())
