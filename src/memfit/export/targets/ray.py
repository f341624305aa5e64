"""A job of Ray Train: one worker a device."""

from __future__ import annotations

from typing import ClassVar, final

from memfit.export.files import ALL_AXES, File
from memfit.export.target import EVERY_KEY, Draft, Job, Target, exports
from memfit.export.targets.cloud import start_on, start_with, train_script

SCRIPT = '''import os
import subprocess

import ray.train
from ray.train.torch import TorchTrainer

NODES, DEVICES = {nodes}, {devices}


def start(config: dict) -> None:
    """One worker a machine, which has all of its devices: it runs what every machine runs."""
    context = ray.train.get_context()
    machine = {{
        "RAY_NODE_RANK": str(context.get_world_rank()),
        "RAY_MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
    }}
    subprocess.run(["bash", config["script"]], check=True, env={{**os.environ, **machine}})


def trainer() -> TorchTrainer:
    return TorchTrainer(
        start,
        train_loop_config={{"script": "train.sh"}},
        scaling_config=ray.train.ScalingConfig(
            num_workers=NODES, use_gpu=True, resources_per_worker={{"GPU": DEVICES}},
            placement_strategy="STRICT_SPREAD" if NODES > 1 else "PACK",
        ),
        run_config=ray.train.RunConfig(name="{name}"),
    )


if __name__ == "__main__":
    trainer().fit()
'''


@final
class Ray(Target):
    """A worker on each machine, which starts the trainer's own processes there."""

    name = "ray"
    title = "Ray Train"
    version = "2.60"
    says: ClassVar = EVERY_KEY
    axes: ClassVar = ALL_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        trained = start_on(job, "$RAY_NODE_RANK", "$RAY_MASTER_ADDR")
        text = SCRIPT.format(nodes=job.nodes, devices=job.per_node, name=job.name)
        start = "ray job submit --working-dir . -- python ray_train.py"
        files = (File(name="ray_train.py", text=text), train_script(trained))
        return start_with(files, trained, start)


exports.register("ray")(Ray())
