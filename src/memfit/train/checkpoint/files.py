"""Files of a checkpoint: written whole or not at all, found, and checked byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.units import MIB
from memfit.parallelism.whole import is_sharded, local_part, shard_number
from memfit.records import Record, read_json, remove_temporary
from memfit.records.habits.continued import name_lineage
from memfit.train.measure.storages import inner_tensors
from memfit.train.run.logs import digest_log
from memfit.train.step.build import Built

NEWEST = 2


FOLDER = "checkpoints"


MANIFEST = "manifest.json"


STATE = "state.json"


LOGGED = "log_sha256"  # in state.json: of the run's log up to this step


UNFINISHED = ".unfinished-"


class Listed(Record, frozen=True, kw_only=True):
    """A file of a checkpoint as it was written."""

    bytes: int
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """manifest.json: what the folder holds beside it."""

    schema: Literal[1] = 1
    files: dict[str, Listed]


def put_in_place(temporary: Path, target: Path) -> None:
    """Let a checkpoint that is whole appear under its name."""
    if target.exists():  # it was not whole, or this run would have begun after it
        _remove(target)
    os.rename(temporary, target)
    flush(target.parent)


class Keep(NamedTuple):
    """Which checkpoints stay when another one is written."""

    newest: int = NEWEST
    best: int = 0  # the step of the best evaluation so far; 0: none is kept for that

    def leaves(self, root: Path, written: Path) -> list[Path]:
        """The checkpoints to delete: the oldest, until `newest` are left. As in transformers
        (`rotate_checkpoints`), the one just written and the best one stay and count among them.

        Those of later steps are damaged, or the run would have gone on from them: they count as
        none, and are replaced when the run is there.
        """
        folders = _folders(root)
        folders = folders[: folders.index(written) + 1]
        stays = {written, folder_of(root, self.best)} & set(folders)
        others = [folder for folder in folders if folder not in stays]
        return others[: max(0, len(folders) - max(self.newest, len(stays)))]


USUAL = Keep()


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return root / f"step-{step:06}"


def remove_old(root: Path, written: Path, keep: Keep = USUAL) -> None:
    """Delete what need not stay beside the checkpoint that was just written."""
    for old in keep.leaves(root, written):
        _remove(old)


def failed_to_save(step: int, root: Path, error: Exception) -> RunFailed:
    """What a run says that cannot write its checkpoint."""
    return RunFailed(
        f"could not save the checkpoint of step {step} in `{root}`: {_reason(error)}",
        hint="free space there and start the same command again: it resumes",
    )


def newest_checkpoint(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint; what is incomplete or damaged is named and passed over."""
    for folder in reversed(_folders(run / FOLDER)):
        problem = find_damage(folder)
        if not problem:
            return folder
        warn(f"passing over `{folder}`: {problem}")
    return None


def find_damage(folder: Path) -> str:
    """Why a checkpoint cannot be used; empty when each file is what the manifest says."""
    try:
        listed = read_json(folder / MANIFEST, Manifest).files
    except InvalidRequest:
        return f"no readable {MANIFEST}"
    if STATE not in listed or len(listed) == 1:
        return f"{MANIFEST} does not list the files of a checkpoint"
    return find_change(folder, listed)


def find_change(folder: Path, listed: Mapping[str, Listed]) -> str:
    """The first of a folder's files that is not as it was listed; empty when all are."""
    for name, entry in listed.items():
        path = folder / Path(name).name  # of no other folder, whatever is written there
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                return f"{name} has {size} bytes, not {entry.bytes}"
            if file_sha256(path) != entry.sha256:
                return f"the content of {name} has changed"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {_reason(error)}"
    return ""


def checkpoint_state(folder: Path) -> dict[str, Any]:
    """state.json of a complete checkpoint."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state


def check_state(folder: Path, built: Built, data_digest: str) -> dict[str, Any]:
    """state.json of a checkpoint that this run can go on from; see `load_checkpoint`."""
    state = checkpoint_state(folder)
    same = state.get("course") == built.recipe.course
    # a run that goes on beyond its end; older checkpoints have neither
    if not same and state.get("lineage") != name_lineage(built.recipe):
        check_digest("recipe", state["recipe_digest"], built.recipe.digest, folder)
    check_digest("data", state["data_digest"], data_digest, folder)
    return state


def check_digest(what: str, held: str, own: str, path: Path) -> None:
    """Raise InvalidRequest when a folder belongs to another recipe or to other data."""
    if held == own:
        return
    hint = "use another run folder, or remove that one to start again"
    if what == "data":
        hint = f"the files of `task.data`, or the tokenizer, are others than then: {hint}"
    raise InvalidRequest(
        f"`{path}` is of {what} {held}, but this run is of {what} {own}", hint=hint
    )


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(MIB):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_state(
    folder: Path,
    step: int,
    built: Built,
    data_digest: str,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """state.json; tensors and scalars: of the optimizer's state."""
    state = {
        "schema": 1,
        "step": step,
        "recipe_digest": built.recipe.digest,
        "course": built.recipe.course,
        "lineage": name_lineage(built.recipe),
        "data_digest": data_digest,
        "on_cpu": [k for k, t in tensors.items() if t.device.type == "cpu"],
        "scalars": scalars,
        "scaler": built.scaler.state_dict() if built.scaler is not None else None,
        "torch": torch.__version__,
        LOGGED: digest_log(folder.parent.parent),
    }
    (folder / STATE).write_text(json.dumps(state))


def describe_files(folder: Path, pattern: str = "*") -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of a folder's files, which are on the disk when this returns."""
    found = {}
    for path in sorted(folder.glob(pattern)):
        found[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        flush(path)
    return found


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """manifest.json, the last file of a checkpoint."""
    (folder / MANIFEST).write_text(json.dumps({"schema": 1, "files": files}, indent=2))
    flush(folder / MANIFEST)
    flush(folder)


def checkpoint_tensors(built: Built) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint holds: trainable parameters, optimizer state, the state's plain numbers."""
    parameters = trainable(built)
    names = {id(p): name for name, p in parameters.items()}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, held in built.optimizer.state.items():
        for field, value in held.items():
            key = f"{names[id(parameter)]}::{field}"
            if not isinstance(value, Tensor):
                scalars[key] = value
                continue
            tensors |= _parts_of(key, value)
    return {name: p.detach() for name, p in parameters.items()}, tensors, scalars


def _parts_of(key: str, value: Tensor) -> dict[str, Tensor]:
    """Return a state's tensors by their keys. A shard of plain numbers is one tensor; a quantised
    one has a key for each rank's shard, as blocks of codes do not follow rows."""
    if not is_sharded(value):
        return {f"{key}::{part}" if part else key: t for part, t in inner_tensors(value).items()}
    parts = inner_tensors(local_part(value))
    if "" in parts:
        return {key: value}
    return {f"{key}::{part}@{shard_number(value)}": inner for part, inner in parts.items()}


def on_host(tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
    """The tensors of one file as they are written: all of them in host memory at once; of shards,
    this rank's part.

    On a CPU they are the same tensors, so saving allocates nothing without `copy`.
    """
    return {n: local_part(t).detach().to("cpu", copy=copy) for n, t in tensors.items()}


def trainable(built: Built) -> dict[str, torch.nn.Parameter]:
    """Parameters that a gradient changes, by name."""
    return {n: p for n, p in built.model.named_parameters() if p.requires_grad}


def _folders(root: Path) -> list[Path]:
    """Checkpoints by step, oldest first."""
    return sorted(root.glob("step-*"), key=lambda p: (len(p.name), p.name))


def _remove(folder: Path) -> None:
    """Rename first: a deletion that is cut short must not leave half a checkpoint."""
    doomed = folder.with_name(f"{UNFINISHED}{folder.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(run: Path) -> None:
    """Delete what a killed process had begun to write or to delete, its ranks' files too."""
    for path in (run / FOLDER).glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for folder in (run, *(run / "ranks").glob("rank-*")):
        remove_temporary(folder)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
