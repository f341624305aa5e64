"""Tokens while they are made: what is tokenised stays when a process is killed.

    <folder>/lock           held by the process that makes the folder
             tokens.bin     of the first shards, as are offsets.bin and learned.bin
             progress.json  how many those are; what is behind them is cut off
             <n>.part.npz   a shard that was finished before an earlier one

A part appears whole, by one rename. It is deleted when progress.json counts its shard.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from memfit.core.units import DAY
from memfit.records import write_atomically
from memfit.train.data.shards.encode import Tokens, choose_dtype, refuse_empty
from memfit.train.data.tokenizer import Tokenizer

COMMIT = 2.0  # seconds between two times that progress is written
NAMES = ("tokens.bin", "offsets.bin", "learned.bin")
Facts = dict[str, Any]


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder alone, made where it is not there; waits for another process that does.

    It is there, and nobody else's, while it is held. Where files cannot be locked, nothing is held:
    OSError.
    """
    lock = None
    while lock is None:
        with contextlib.suppress(FileExistsError):  # it was there, and is moved away meanwhile
            folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    with lock:
        yield


def _lock(folder: Path) -> TextIO | None:
    """The folder's lock, held; None where the process that held it has moved the folder away."""
    try:
        lock = (folder / "lock").open("a")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock.fileno()), (folder / "lock").stat()):
            return lock
    except FileNotFoundError:
        pass
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


def remove_abandoned(root: Path) -> None:
    """Delete what no process has touched, and none holds, for more than a day."""
    for path in root.glob(".*"):
        with contextlib.suppress(OSError):
            newest = max((p.stat().st_mtime for p in (path, *path.glob("*"))), default=0.0)
            if time.time() - newest > DAY and not _is_held(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    try:
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def write_part(folder: Path, number: int, tokens: Tokens) -> None:
    """Put a finished shard's tokens into the folder."""
    learned = np.array([], dtype="uint8") if tokens.learned is None else tokens.learned
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
        np.savez(
            file, ids=tokens.ids, ends=tokens.ends, learned=learned,
            rest=json.dumps([tokens.place, tokens.head, tokens.tail]),
        )  # fmt: skip
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, _part(folder, number))


def read_part(folder: Path, number: int) -> Tokens:
    """A finished shard's tokens."""
    with _part(folder, number).open("rb") as file, np.load(file) as held:
        learned = held["learned"]
        place, head, tail = json.loads(str(held["rest"]))
        flags = learned if len(learned) else None
        return Tokens(held["ids"], held["ends"], flags, place, head, tail)


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number}.part.npz"


class Making:
    """The files of a corpus that is being made, which only grow."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, facts: Facts) -> None:
        """Go on from what is in the folder, where it was made of the same facts."""
        self.folder = folder
        self.dtype = choose_dtype(tokenizer)
        self._facts = facts
        self.shards = self.tokens = self.documents = self._inside = 0
        self._masked = False
        if not self._go_on():
            for path in folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            for name in NAMES[:2]:
                (folder / name).touch()
            self._append("offsets.bin", np.zeros(1, dtype="int64"))
        self._committed, self._when = self.shards, time.monotonic()
        for path in folder.glob("*.tmp"):
            path.unlink()

    def _go_on(self) -> bool:
        """Take up the progress of an earlier process; False where there is none to take up."""
        try:
            progress = json.loads((self.folder / "progress.json").read_text())
            if progress.pop("facts") != self._facts:
                return False
            self.shards, self.documents, self.tokens, self._masked, self._inside = (
                progress[name] for name in ("shards", "documents", "tokens", "masked", "inside")
            )
            width = np.dtype(self.dtype).itemsize
            sizes = (self.tokens * width, 8 * (self.documents + 1), self.tokens)
            for name, size in zip(NAMES, sizes, strict=True):
                if name == NAMES[2] and not self._masked:
                    (self.folder / name).unlink(missing_ok=True)
                elif (self.folder / name).stat().st_size < size:
                    raise ValueError(name)
                else:
                    os.truncate(self.folder / name, size)
        except (OSError, ValueError, KeyError, AttributeError):
            self.shards = self.tokens = self.documents = self._inside = 0
            self._masked = False
            return False
        return True

    def find_parts(self) -> set[int]:
        """Shards that are finished and not appended; what is damaged is removed."""
        found = set()
        for path in self.folder.glob("*.part.npz"):
            number = int(path.name.split(".")[0])
            try:
                read_part(self.folder, number)
                found.add(number)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                path.unlink()
        return found

    def append_part(self) -> None:
        """Append the next shard, which is a part of the folder."""
        self.append(read_part(self.folder, self.shards))

    def append(self, tokens: Tokens) -> None:
        """Append the next shard. Raises InvalidRequest for a long document without tokens."""
        ends = tokens.ends + self.tokens
        if tokens.head is not None and not self._inside + tokens.head:
            refuse_empty(tokens.place)
        if tokens.learned is not None and not self._masked:
            self._masked = True
            for start in range(0, self.tokens, 2**20):
                self._append(NAMES[2], np.ones(min(2**20, self.tokens - start), dtype="uint8"))
        if self._masked:
            learned = tokens.learned
            ones = np.ones(len(tokens.ids), dtype="uint8")
            self._append(NAMES[2], ones if learned is None else learned)
        self._append(NAMES[0], tokens.ids)
        self._append(NAMES[1], ends)
        self.shards += 1
        self.tokens += len(tokens.ids)
        self.documents += len(ends)
        self._inside = tokens.tail + (0 if len(ends) else self._inside)
        if time.monotonic() - self._when > COMMIT:
            self._commit()

    def _append(self, name: str, values: np.ndarray[Any, np.dtype[Any]]) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(values.tobytes())

    def _commit(self) -> None:
        """Write down how far it is; the parts up to there are not needed any more."""
        self._flush()
        progress = {
            "facts": self._facts, "shards": self.shards, "documents": self.documents,
            "tokens": self.tokens, "masked": self._masked, "inside": self._inside,
        }  # fmt: skip
        write_atomically(self.folder / "progress.json", json.dumps(progress).encode())
        for number in range(self._committed, self.shards):
            _part(self.folder, number).unlink(missing_ok=True)
        self._committed, self._when = self.shards, time.monotonic()

    def _flush(self) -> None:
        for name in NAMES[: 3 if self._masked else 2]:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())

    def finish(self, meta: Facts) -> None:
        """Leave the files of a corpus and the lock, and say in meta.json what they are."""
        self._flush()
        names = NAMES[: 3 if self._masked else 2]
        for path in self.folder.iterdir():
            if path.name not in (*names, "lock"):
                path.unlink()
        sizes = {name: (self.folder / name).stat().st_size for name in sorted(names)}
        text = json.dumps({**meta, "dtype": self.dtype, "files": sizes})
        write_atomically(self.folder / "meta.json", text.encode())
