"""A task for SkyPilot's `sky launch`."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export import EVERY_KEY, Draft, Job, Target, exports
from memfit.export._cloud import accelerator, setup, start_on, train_script
from memfit.export._files import ALL_AXES, File
from memfit.export._peak import Peak, planned


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
        return Draft(
            files=(*files, *trained.files), left=trained.left, start="sky launch skypilot.yaml"
        )

    def find_peak(self, job: Job, draft: Draft) -> Peak:
        """See `Target.find_peak`: the plan's own; a scheduler has no step."""
        return planned(job.plan)


exports.register("skypilot")(SkyPilot())
