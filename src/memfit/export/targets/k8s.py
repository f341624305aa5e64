"""A TrainJob for Kubeflow's trainer on Kubernetes."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.export.files import ALL_AXES, File
from memfit.export.target import EVERY_KEY, Draft, Job, Target, exports
from memfit.export.targets.cloud import IMAGE, setup, start_on, start_with, train_script

RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}


@final
class Kubernetes(Target):
    """A TrainJob; a ConfigMap brings the trainer's files to /plan of its pods."""

    name = "k8s"
    title = "Kubeflow TrainJob"
    version = "v1alpha1"
    says: ClassVar = EVERY_KEY
    axes: ClassVar = ALL_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        # the runtime's own launcher sets PET_NODE_RANK and PET_MASTER_ADDR in every pod
        trained = start_on(job, "$PET_NODE_RANK", "$PET_MASTER_ADDR")
        resource = RESOURCES.get(job.device.platform, "nvidia.com/gpu")
        values: dict[str, Any] = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {
                "runtimeRef": {
                    "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime",
                    "name": "torch-distributed",
                },
                "trainer": {
                    "image": IMAGE,
                    "numNodes": job.nodes,
                    "command": ["bash", "-c"],
                    "args": [
                        f"{setup(job)} && mkdir run && cp /plan/* run && cd run && bash train.sh"
                    ],
                    "resourcesPerNode": {"limits": {resource: str(job.per_node)}},
                },
                "runtimePatches": [_mount(job.name)],
            },
        }  # fmt: skip
        names = [file.name for file in trained.files] + ["train.sh"]
        put = " ".join(f"--from-file={name}" for name in names)
        files = (File(name="trainjob.yaml", data=values), train_script(trained))
        return start_with(
            files,
            trained,
            f"kubectl create configmap {job.name} {put} && kubectl apply -f trainjob.yaml",
        )


def _mount(name: str) -> dict[str, Any]:
    """The ConfigMap as a folder of the pods that `torch-distributed` names `node`."""
    pod = {
        "volumes": [{"name": "plan", "configMap": {"name": name}}],
        "containers": [
            {"name": "node", "volumeMounts": [{"name": "plan", "mountPath": "/plan"}]}
        ],
    }  # fmt: skip
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {
        "manager": "memfit.dev/export",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }


exports.register("k8s")(Kubernetes())
