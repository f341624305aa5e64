"""A task for dstack's `dstack apply`."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export.files import ALL_AXES, File
from memfit.export.target import EVERY_KEY, Draft, Job, Target, exports
from memfit.export.targets.cloud import accelerator, setup, start_on, start_with, train_script


@final
class Dstack(Target):
    """Machines of a fleet with the plan's devices."""

    name = "dstack"
    title = "dstack"
    version = "0.22"
    says: ClassVar = EVERY_KEY
    axes: ClassVar = ALL_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        trained = start_on(job, "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP")
        name = accelerator(job).partition("-")[0]
        memory = job.device.memory
        gpu = f"{name}:{memory // 2**30}GB.." if memory else name
        values: dict[str, Any] = {
            "type": "task",
            "name": job.name,
            "nodes": job.nodes,
            "python": "3.12",
            "commands": [setup(job), "bash train.sh"],
            "resources": {"gpu": f"{gpu}:{job.per_node}", "shm_size": "16GB"},
        }
        files = (File(name="memfit.dstack.yml", data=values), train_script(trained))
        return start_with(files, trained, "dstack apply -f memfit.dstack.yml")


exports.register("dstack")(Dstack())
