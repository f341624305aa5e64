"""Log-probabilities of the reference, computed once: the model as it was before the first step.

    folder/reference.npz   training, held_out: (documents,) float32, NaN where no step looks
                           key: the recipe and the data that they are of

Fine-tuning all weights by preference needs them, since what is trained is the reference no more;
with an adapter they save each step a forward. The pass holds what an evaluation holds, at most.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memfit.core.errors import RunFailed
from memfit.records import write_atomically
from memfit.records.ledger import Phase
from memfit.train.data.packing import Array
from memfit.train.data.sampler import Sampler
from memfit.train.measure.counters import to_batch
from memfit.train.run.session import Session
from memfit.train.step.build import Built
from memfit.train.step.step import Batch, log_probs

FILE = "reference.npz"
TOGETHER = 2**16  # values that ranks exchange at a time


def give_reference(session: Session, built: Built) -> None:
    """Give the session's samplers the reference's values, from the run folder or computed now.

    built: with the weights that training starts from. Raises RunFailed: interrupted, a full disk.
    """
    if session.recipe.preference.reference != "precomputed":
        return
    found = _read(session)
    if session.ranks.any(found is None) or found is None:
        found = session.meter.watch(built, Phase.EVALUATE, lambda: _compute_all(session, built))
        if session.ranks.rank == 0:
            _write(session, found)
    session.sampler.reference = found["training"]
    if session.held_out is not None:
        session.held_out.reference = found["held_out"]


def _compute_all(session: Session, built: Built) -> dict[str, Array]:
    recipe, held_out = session.recipe, session.held_out
    session.progress.note("computing the reference's log-probabilities, once for the run")
    found = {"training": _compute(session, built, session.sampler, recipe.steps)}
    if held_out is not None:
        found["held_out"] = _compute(session, built, held_out, None)
    return found


def _compute(session: Session, built: Built, sampler: Sampler, steps: int | None) -> Array:
    """(documents,) float32 of those that the first `steps` steps see; None: of all. With answers to
    other prompts (2, documents)."""
    mismatches = session.recipe.mismatches
    values = np.full((1 + mismatches, sampler.corpus.documents), np.nan, dtype="float32")
    most = None if steps is None else steps * session.recipe.accumulation
    for index, micro in enumerate(sampler.all_once()):
        if most is not None and index >= most:
            break
        if session.ranks.any(session.interrupts.requested):
            raise RunFailed(
                "interrupted before the first step",
                hint="start the same command again: it begins with the reference",
            )
        documents = sampler.documents_of(index)
        batch = to_batch(micro, built.device)
        for own, scored in zip(values, _scored(batch), strict=True):
            rows = log_probs(built, scored).cpu().numpy()
            own[documents] = rows[: len(documents)]
    values = np.stack([_join(session, own) for own in values])
    return values if mismatches else values[0]


def _join(session: Session, values: Array) -> Array:
    """What any rank has computed, NaN where none has."""
    if session.ranks.size == 1:
        return values
    found = [
        np.array(session.ranks.gather(*values[start : start + TOGETHER].tolist()), dtype="float32")
        for start in range(0, len(values), TOGETHER)
    ]
    joined: Array = np.fmax.reduce(np.concatenate(found, axis=1), axis=0)
    return joined


def _scored(batch: Batch) -> Iterator[Batch]:
    """The rows, and beside them answers to other prompts where there are any."""
    yield batch
    if batch.rated is not None and batch.rated.input_ids is not None:
        assert batch.rated.labels is not None
        yield Batch(batch.rated.input_ids, batch.rated.labels)


def _key(session: Session) -> str:
    data = session.data
    held_out = data.held_out.digest if data.held_out else ""
    return f"{session.recipe.digest} {data.training.digest} {held_out}"


def _read(session: Session) -> dict[str, Array] | None:
    """What an earlier start of this very run computed."""
    try:
        with np.load(session.folder / FILE, allow_pickle=False) as file:
            if str(file["key"]) != _key(session):
                return None
            return {name: file[name] for name in file.files if name != "key"}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _write(session: Session, found: dict[str, Array]) -> None:
    made = io.BytesIO()
    arrays: dict[str, Any] = {"key": np.array(_key(session)), **found}
    np.savez(made, **arrays)
    path: Path = session.folder / FILE
    try:
        write_atomically(path, made.getvalue())
    except OSError as error:
        raise RunFailed(
            f"could not write `{path}`: {error.strerror}",
            hint="free space there and start the same command again",
        ) from None
