"""What the schedulers have in common: they start a plan's own trainer on every machine."""

from __future__ import annotations

from memfit.export.files import File
from memfit.export.start import Trained, find_trainer
from memfit.export.target import Draft, Job
from memfit.export.torchrun import Machines

IMAGE = "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel"
# names that clouds have for our devices, where they are not the vendor's own
ACCELERATORS = {
    "h100-sxm": "H100", "h100-pcie": "H100", "h100-nvl": "H100", "h200-sxm": "H200",
    "a100-sxm-80": "A100-80GB", "a100-pcie-80": "A100-80GB", "a100-sxm-40": "A100",
    "a100-pcie-40": "A100", "b200": "B200", "b200-sxm": "B200", "l4": "L4", "l40s": "L40S",
    "l40": "L40", "a10": "A10", "a10g": "A10G", "rtx-4090": "RTX4090", "rtx-3090": "RTX3090",
    "v100-sxm-32": "V100-32GB", "v100-sxm-16": "V100", "t4": "T4", "mi300x": "MI300X",
}  # fmt: skip
SETUP = {
    "memfit": "pip install 'memfit[train]'",
    "trl": "pip install 'trl[peft,quantization]' accelerate",
    "hf-trainer": "pip install transformers accelerate peft",
    "deepspeed": "pip install deepspeed transformers",
    "torchtitan": "pip install torchtitan",
    "megatron": "pip install megatron-core",
}


def accelerator(job: Job) -> str:
    """Return the device's name in clouds, which is the first part of memfit's own by default."""
    return ACCELERATORS.get(job.recipe.device, job.recipe.device.upper().split("-")[0])


def start_on(job: Job, rank: str, address: str) -> Trained:
    """Return the trainer's files.

    rank, address: shell expressions for the machine's number and for the first machine's address.
    """
    return find_trainer(job, Machines(rank, address))


def setup(job: Job) -> str:
    """Return the commands that install what the framework needs on a fresh machine."""
    return SETUP[job.recipe.framework]


def train_script(trained: Trained) -> File:
    """train.sh: what every machine runs."""
    return File(name="train.sh", text=f"set -euo pipefail\n{trained.script}", first="#!/bin/bash\n")


def start_with(files: tuple[File, ...], trained: Trained, start: str) -> Draft:
    """A scheduler's files with those of the trainer that they start."""
    return Draft(
        files=(*files, *trained.files), left=trained.left, start=start, needs=trained.needs,
        notes=trained.notes,
    )  # fmt: skip
