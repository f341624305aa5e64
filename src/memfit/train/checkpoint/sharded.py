"""Checkpoints of many ranks, by torch's distributed checkpoint (DCP): each rank writes its shards.

    checkpoints/step-000100/   shard-00001-….safetensors   of the first rank, and so on: weights and
                                                           optimizer state under the same keys as
                                                           in a checkpoint of one rank
                               state.json, manifest.json   as there

DCP knows which part of which tensor each file holds, so that any other layout reads what it needs,
and a checkpoint of one rank is read by many. It appears whole or not at all: when all ranks' files
are on the disk, the first one writes the manifest and renames the folder.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from memfit.core.errors import InvalidRequest
from memfit.parallelism import make_mesh
from memfit.parallelism.experts import RANKS, make_mesh_of_experts
from memfit.parallelism.whole import is_sharded
from memfit.records.recipe import Parallel
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
from memfit.train.distributed.ranks import TIMEOUT, Ranks
from memfit.train.step.build import Built
from memfit.train.step.host_states import Offloaded


class Saver:
    """Writes the checkpoints of a run on many ranks, one at a time; every rank has one.

    asynchronous: what is saved is copied to host memory, and written while training goes on. On a
    CPU that copy would count against the run's own limit, so it is only made on request.
    """

    def __init__(self, run: Path, ranks: Ranks, *, asynchronous: bool) -> None:
        self._root = run / FOLDER
        self._ranks = ranks
        self._asynchronous = asynchronous
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # of the writing thread
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._writing: threading.Thread | None = None
        self._step = 0
        self._failure: Exception | None = None

    def save(self, step: int, built: Built, data_digest: str, keep: Keep = USUAL) -> None:
        """Write step-…; returns when it is whole, or at once where it is written meanwhile.

        Raises RunFailed on all ranks where one of them cannot write this one, or the one before.
        """
        self.finish()
        target = folder_of(self._root, step)
        temporary = self._root / f"{UNFINISHED}{target.name}"
        weights, tensors, scalars = checkpoint_tensors(built)
        held = {**weights, **tensors}
        here = on_host(held, copy=self._asynchronous)
        parallel = built.recipe.parallel
        state = {name: self._placed(held[name], part, parallel) for name, part in here.items()}
        self._step = step

        def begin() -> str:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                write_state(temporary, step, built, data_digest, tensors, scalars)
            except OSError as error:
                raise failed_to_save(step, self._root, error) from None
            return ""

        self._ranks.from_first(begin)
        self._writing = threading.Thread(
            target=self._write,
            args=(state, temporary, target, keep),
            name="checkpoint",
            daemon=True,
        )
        self._writing.start()
        if not self._asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written; RunFailed where it could not be."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failed_to_save(self._step, self._root, failure) from None

    def _placed(self, held: Tensor, part: Tensor, parallel: Parallel) -> Tensor:
        """This rank's part in host memory, with its place in the whole."""
        if not is_sharded(held):
            return part
        shard = cast(DTensor, held)
        mesh = shard.device_mesh
        if mesh.device_type != "cpu":
            names = mesh.mesh_dim_names or ()
            if names not in self._meshes:
                make = make_mesh_of_experts if RANKS in names else make_mesh
                self._meshes[names] = make(parallel, "cpu")[names]
            mesh = self._meshes[names]
        return DTensor.from_local(
            part, mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )

    def _write(
        self, state: Mapping[str, Tensor], temporary: Path, target: Path, keep: Keep
    ) -> None:
        try:
            writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
            save(dict(state), storage_writer=writer, process_group=self._group)
            found: list[Any] = [None] * self._ranks.size
            dist.all_gather_object(found, self._describe(temporary), group=self._group)
            for part in found:
                if isinstance(part, OSError):
                    raise part
            if self._ranks.rank == 0:
                write_manifest(temporary, {n: part for part in found for n, part in part.items()})
                put_in_place(temporary, target)
                remove_old(self._root, target, keep)
            dist.barrier(group=self._group)
        except Exception as error:  # told by `finish`, in the thread that trains
            self._failure = error
            if self._ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def _describe(self, folder: Path) -> dict[str, dict[str, Any]] | OSError:
        """The files that are this rank's; an error of its disk is everybody's."""
        try:
            found = describe_files(folder, f"shard-{self._ranks.rank + 1:05}-*")
            if self._ranks.rank == 0:
                found |= describe_files(folder, "state.json")
        except OSError as error:
            return error
        return found


def load_shards(folder: Path, built: Built, data_digest: str) -> int:
    """Fill this rank's weights and optimizer state from a checkpoint of any layout; the steps done.

    Raises InvalidRequest when the checkpoint is of another recipe or other data, or holds
    quantised moments of another number of shards.
    """
    state = check_state(folder, built, data_digest)
    _make_states(built)
    weights, tensors, _ = checkpoint_tensors(built)
    reader = HuggingFaceStorageReader(str(folder))
    wanted = {**weights, **tensors}
    missing = sorted(wanted.keys() - reader.read_metadata().state_dict_metadata.keys())
    if missing:
        raise InvalidRequest(
            f"`{folder}` holds no `{missing[0]}`, which this layout needs",
            hint="moments in 8 or 4 bits go on only on as many shards as they were saved on",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are no others, which is so
        load(dict(wanted), storage_reader=reader, no_dist=not dist.is_initialized())
    parameters = trainable(built)
    for key, value in state["scalars"].items():
        name, _, field = key.partition("::")
        built.optimizer.state[parameters[name]][field] = value
    if isinstance(built.optimizer, Offloaded):
        built.optimizer.refresh()
    return int(state["step"])


def _make_states(built: Built) -> None:
    """Let the optimizer make its states as it makes them: by a step that changes nothing, of one
    weight at a time, so that no more than one gradient is there."""
    built.optimizer.state.clear()
    rates = [group["lr"] for group in built.optimizer.param_groups]
    for group in built.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in trainable(built).values():
        parameter.grad = torch.zeros_like(parameter)
        built.optimizer.step()
        parameter.grad = None
    for group, rate in zip(built.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
