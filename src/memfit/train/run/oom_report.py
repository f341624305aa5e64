"""What was alive when memory ran out: counted by `LiveBytes`, or found among Python's objects."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.records.ledger import Entry, Kind, Phase
from memfit.records.results import Certificate, OutOfMemory, group_tensors
from memfit.records.results import Tensor as TensorRow
from memfit.train.measure.storages import inner_tensors
from memfit.train.run.drift import compare_entries
from memfit.train.step.build import Built

SNAPSHOT = "out_of_memory.pickle"
LISTED = 20
REACHED = "reached from Python"
UNREACHED = "autograd"


class Alive(NamedTuple):
    """Who held the memory at one moment."""

    phase: Phase
    entries: tuple[Entry, ...]
    tensors: tuple[tuple[str, TensorRow], ...]  # with the owner under which an entry counts them
    complete: bool


def describe_shortage(
    alive: Alive, certificate: Certificate | None, *, recipe_digest: str, moment: str, message: str
) -> OutOfMemory:
    """The difference between what was alive and what was certified for that phase."""
    promised = certificate.ledger.at(alive.phase) if certificate else ()
    rows = compare_entries(alive.entries, promised)
    above = {(row.kind, row.owner) for row in rows if row.excess > 0}
    found = [tensor for owner, tensor in alive.tensors if (tensor.kind, owner) in above]
    return OutOfMemory(
        recipe_digest=recipe_digest,
        where=moment,
        phase=str(alive.phase),
        message=message,
        complete=alive.complete,
        held=sum(entry.nbytes for entry in alive.entries),
        certified=certificate.phases.get(str(alive.phase)) if certificate else None,
        components=rows,
        tensors=group_tensors(found)[:LISTED],
        checkpoint="",
        snapshot="",
    )


def find_alive(built: Built | None, phase: Phase, device: torch.device) -> Alive:
    """What can be found when nobody counted: the built tensors, and others that Python reaches.

    What autograd alone holds is not found; on CUDA it is the rest of the allocated bytes. Call it
    before the failure's frames are gone: they hold its tensors.
    """
    seen: set[int] = set()
    rows: list[tuple[str, TensorRow]] = []

    def add(tensor: Tensor, kind: Kind, owner: str, module: str) -> None:
        for part in inner_tensors(tensor).values():
            storage = part.untyped_storage()
            if part.device.type != device.type or storage._cdata in seen or not storage.nbytes():
                continue
            seen.add(storage._cdata)
            dtype = str(part.dtype).removeprefix("torch.")
            row = TensorRow(
                nbytes=storage.nbytes(), kind=kind, module=module, op="", shape=tuple(part.shape),
                dtype=dtype,
            )  # fmt: skip
            rows.append((owner, row))

    for tensor, kind, owner, name in _known(built) if built is not None else ():
        add(tensor, kind, owner, name)
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not issubclass(type(thing), FakeTensor):
            with suppress(RuntimeError):  # sparse, nested and opaque ones: they hold no storage
                add(thing, Kind.TEMPORARY, REACHED, "")
    entries = _sum(rows, phase)
    if device.type == "cuda":
        rest = torch.cuda.memory_allocated(device) - sum(e.nbytes for e in entries)
        if rest > 0:
            why = "allocated, and reached by no object of Python: what autograd saved, for the most"
            entries.append(
                Entry(kind=Kind.ACTIVATIONS, phase=phase, owner=UNREACHED, nbytes=rest, because=why)
            )
    return Alive(phase, tuple(entries), tuple(rows), complete=False)


def _known(built: Built) -> Iterator[tuple[Tensor, Kind, str, str]]:
    """What a step is built of, under the owners that a coarse ledger can tell."""
    for name, parameter in built.model.named_parameters():
        yield parameter, Kind.PARAMETERS, "model", name
        if parameter.grad is not None:
            yield parameter.grad, Kind.GRADIENTS, "model", name
    for name, buffer in built.model.named_buffers():
        yield buffer, Kind.PARAMETERS, "model", name
    for state in built.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield value, Kind.OPTIMIZER_STATE, "optimizer", name


def _sum(rows: Iterable[tuple[str, TensorRow]], phase: Phase) -> list[Entry]:
    groups: dict[tuple[str, str], list[TensorRow]] = {}
    for owner, row in rows:
        groups.setdefault((row.kind, owner), []).append(row)
    return [
        Entry(
            kind=Kind(kind),
            phase=phase,
            owner=owner,
            nbytes=sum(row.nbytes for row in group),
            because=f"{len(group)} tensors, largest {max(row.nbytes for row in group)} B",
        )
        for (kind, owner), group in sorted(groups.items())
    ]


def dump_snapshot(folder: Path) -> str:
    """torch's own picture of its CUDA allocator, for PyTorch's memory viewer; "" without CUDA."""
    if not torch.cuda.is_available():
        return ""
    path = folder / SNAPSHOT
    with suppress(OSError, RuntimeError):
        path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
        return str(path)
    return ""
