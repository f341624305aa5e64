"""Packed rows of many examples, stored beside their tokens: packing them takes seconds.

    <corpus>/rows-<digest>.npz    the arrays of a `RowTable`

The digest covers what packing depends on beside the corpus: the length of a row, the seed, and
whether longer examples are cut. It is made anew where it is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from memfit.train.data.packing import Array, RowTable, pack_best_fit
from memfit.train.data.tokens import Corpus

FORMAT = 1  # another way to pack makes other files
WORTH = 100_000  # examples: fewer are packed in a moment
MOST = 4  # files of one corpus; older ones are deleted
COLUMNS = ("documents", "starts", "stops", "begins")


def read_packed_rows(
    corpus: Corpus, lengths: Array, width: int, seed: int, *, cut: bool
) -> RowTable:
    """`pack_best_fit` of a corpus, where `lengths` follow from it, `width` and `cut`."""
    if corpus.folder is None or corpus.documents < WORTH:
        return pack_best_fit(lengths, width, seed, cut=cut)
    facts = json.dumps([FORMAT, width, seed, cut])
    file = corpus.folder / f"rows-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npz"
    with (
        contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        file.open("rb") as opened,
        np.load(opened) as held,
    ):
        return RowTable(*(held[name] for name in COLUMNS))
    table = pack_best_fit(lengths, width, seed, cut=cut)
    with contextlib.suppress(OSError):  # then the next start packs them again
        _write(file, table)
    return table


def _write(file: Path, table: RowTable) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as made:
        np.savez(
            made, documents=table.documents, starts=table.starts, stops=table.stops,
            begins=table.begins,
        )  # fmt: skip
        made.flush()
        os.fsync(made.fileno())
    os.replace(made.name, file)
    files = sorted(file.parent.glob("rows-*.npz"), key=lambda path: path.stat().st_mtime)
    for old in files[:-MOST]:
        old.unlink(missing_ok=True)
