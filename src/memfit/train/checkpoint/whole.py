"""What a run needs to go on: written whole or not at all, used only when every byte is right.

    checkpoints/step-000100/   weights.safetensors     trainable parameters, by name
                               optimizer.safetensors   optimizer state, `parameter::key`, or
                                                       `parameter::key::part` of quantised moments
                               shard-….safetensors     of many ranks: both, see `sharded_checkpoint`
                               state.json              step, digests, the state's numbers, scale
                               manifest.json           size and SHA-256 of the other files

Batches and random numbers are functions of (seed, step), so the step is all else there is. A
folder is written under another name, flushed to disk and renamed; of older ones `run.keep` stay.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memfit.train.checkpoint.files import (
    FOLDER,
    UNFINISHED,
    USUAL,
    Keep,
    check_state,
    checkpoint_tensors,
    describe_files,
    failed_to_save,
    folder_of,
    on_host,
    put_in_place,
    remove_old,
    trainable,
    write_manifest,
    write_state,
)
from memfit.train.measure.storages import inner_tensors
from memfit.train.step.build import Built
from memfit.train.step.host_states import Offloaded

WEIGHTS = "weights.safetensors"


def save_checkpoint(
    run: Path, step: int, built: Built, data_digest: str, keep: Keep = USUAL
) -> Path:
    """Write `run`/checkpoints/step-… and delete all but those to keep, the newest two unless
    another number is stated.

    Raises RunFailed when the disk is full or not writable; earlier checkpoints are untouched and
    nothing half written is left.
    """
    root = run / FOLDER
    target = folder_of(root, step)
    temporary = root / f"{UNFINISHED}{target.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, step, built, data_digest)
        put_in_place(temporary, target)
    except (OSError, SafetensorError) as error:
        raise failed_to_save(step, root, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remove_old(root, target, keep)
    return target


def load_checkpoint(folder: Path, built: Built, data_digest: str) -> int:
    """Put weights and optimizer state back, bit by bit; returns the steps done.

    Raises InvalidRequest when the checkpoint is of another recipe or of other data.
    """
    if built.recipe.parallel.world > 1 or not (folder / WEIGHTS).exists():
        from memfit.train.checkpoint.sharded import load_shards

        return load_shards(folder, built, data_digest)
    state = check_state(folder, built, data_digest)
    parameters = trainable(built)
    device = built.device
    with safe_open(folder / WEIGHTS, framework="pt") as file, torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(file.get_tensor(name))
    built.optimizer.state.clear()
    with safe_open(folder / "optimizer.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            name, field, *part = key.split("::")
            home = "cpu" if key in state["on_cpu"] else device
            value = file.get_tensor(key).to(home)
            held = built.optimizer.state[parameters[name]]
            if part:
                _fill_part(built.optimizer, parameters[name], field, part[0], value)
            else:
                held[field] = value
    for key, value in state["scalars"].items():
        name, _, field = key.partition("::")
        built.optimizer.state[parameters[name]][field] = value
    if isinstance(built.optimizer, Offloaded):
        built.optimizer.refresh()
    if built.scaler is not None:
        built.scaler.load_state_dict(state["scaler"])
    return int(state["step"])


def _write(folder: Path, step: int, built: Built, data_digest: str) -> None:
    weights, tensors, scalars = checkpoint_tensors(built)
    save_file(on_host(weights), folder / WEIGHTS)
    save_file(on_host(tensors), folder / "optimizer.safetensors")
    write_state(folder, step, built, data_digest, tensors, scalars)
    write_manifest(folder, describe_files(folder))


def _fill_part(optimizer: Any, parameter: Tensor, field: str, part: str, value: Tensor) -> None:
    """Restore one tensor of a quantised moment into a state that the optimizer made."""
    held = optimizer.state[parameter]
    if field not in held:
        held[field] = optimizer.new_state(parameter)[field]
    inner_tensors(held[field])[part].copy_(value)
