"""A task for SkyPilot's `sky launch`."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export.files import ALL_AXES, File
from memfit.export.target import EVERY_KEY, Draft, Job, Target, exports
from memfit.export.targets.cloud import accelerator, setup, start_on, start_with, train_script


@final
class SkyPilot(Target):
    """Machines of any cloud with the plan's devices."""

    name = "skypilot"
    title = "SkyPilot"
    version = "0.14"
    says: ClassVar = EVERY_KEY
    axes: ClassVar = ALL_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        trained = start_on(job, "$SKYPILOT_NODE_RANK", "$MASTER_ADDR")
        run = 'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\nexport MASTER_ADDR\n'
        values: dict[str, Any] = {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": {"accelerators": f"{accelerator(job)}:{job.per_node}"},
            "workdir": ".",
            "setup": f"{setup(job)}\n",
            "run": f"{run}bash train.sh\n",
        }
        files = (File(name="skypilot.yaml", data=values), train_script(trained))
        return start_with(files, trained, "sky launch skypilot.yaml")


exports.register("skypilot")(SkyPilot())
