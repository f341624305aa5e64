"""The data as token ids: tokenised once, in a memory-mapped cache named by its content.

    <cache>/<key>/tokens.bin    ids of all documents, uint16 or uint32
                  offsets.bin   int64, documents + 1: where each document begins
                  learned.bin   uint8 per token, 1 where it is learned, 2 in a desirable answer;
                                absent when all are 1
                  meta.json     sizes of the above and what was left out

The key covers the files' bytes, the tokenizer and what is learned. A folder appears complete, by
one rename, or not at all; of two processes that want the same key one makes it and the other waits.
Until then it is `<cache>/.<key>`, from which the next process goes on (see `shards.parts`).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memfit.core import units
from memfit.core.cache_folder import cache_folder
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.train.data.readers import Sources
from memfit.train.data.shards.encode import encode_shard
from memfit.train.data.shards.parts import Making, claim, remove_abandoned
from memfit.train.data.shards.split import SHARD, split
from memfit.train.data.shards.workers import start_workers
from memfit.train.data.tokenizer import Tokenizer

FORMAT = 3  # part of the key: another way to tokenise or to store makes another cache

MUCH = 64 * units.MIB  # bytes of data that take a while
INTERVAL = 30.0  # seconds between two words of how far it is
Say = Callable[[str], None]
Array = np.ndarray[Any, np.dtype[Any]]


class Share(NamedTuple):
    """One data set of several, by whose shares rows are shown."""

    name: str
    share: float  # of the rows
    corpus: Corpus


class Corpus(NamedTuple):
    """Token ids of all documents, one after the other, and where each begins."""

    tokens: Array  # (tokens,) uint16 or uint32
    offsets: Array  # (documents + 1,) int64
    # (tokens,) uint8, 0 of what is not learned, 2 of desirable answers; None: 1 of every token
    learned: Array | None
    digest: str  # names the content: the cache's key
    notes: tuple[str, ...]  # what was passed over, for the user to read
    folder: Path | None = None  # of the cache, which holds it
    chosen: Array | None = None  # (documents,) bool: those of a part of the data; None: all
    parts: tuple[Share, ...] = ()  # the data sets that it joins; () of a single one

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    def is_desirable(self, document: int) -> bool:
        """Whether a rated answer is."""
        begin, end = (int(self.offsets[document + i]) for i in (0, 1))
        return self.learned is not None and bool((self.learned[begin:end] == 2).any())

    @property
    def lengths(self) -> Array:
        """(documents,) tokens of each document; 0 of one that is not in this part."""
        found = np.diff(self.offsets)
        return found if self.chosen is None else np.where(self.chosen, found, 0)

    def forget(self) -> None:
        """Give back the pages of this process that a walk through the files has mapped."""
        for part in self.parts:
            part.corpus.forget()
        for array in (self.tokens, self.offsets, self.learned):
            mapped = getattr(array, "_mmap", None)
            if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


def choose_held_out(count: int, share: float, seed: int) -> np.ndarray:
    """(documents,) bool: those that are held out, as `datasets` draws them (`train_test_split`).

    Raises InvalidRequest where all would be, or none.
    """
    held = math.ceil(share * count)
    if not 0 < held < count:
        raise InvalidRequest(
            f"`task.evaluation_share: {share:g}` of {count} documents holds out {held}, which"
            f" leaves {count - held} to train on",
            hint="name held-out data of its own in `task.evaluation`, or give more documents",
        )
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(count)[:held]] = True
    return chosen


def divide(corpus: Corpus, share: float, seed: int, together: int) -> tuple[Corpus, Corpus]:
    """The data to train on and a share of it that is held out, drawn as `datasets` draws it
    (`train_test_split`): the first of a permutation, rounded up. Both read the same files.

    together: documents that stay together, 2 where they are pairs. Raises InvalidRequest where one
    of the two would be empty.
    """
    chosen = choose_held_out(corpus.documents // together, share, seed)
    chosen = np.repeat(chosen, together)
    training, held_out = (
        corpus._replace(chosen=own, folder=None, digest=f"{corpus.digest}-{name}-{share:g}-{seed}")
        for own, name in ((~chosen, "training"), (chosen, "held-out"))
    )
    return training, held_out


def read_corpus(
    sources: Sources,
    tokenizer: Tokenizer,
    objective: str,
    cache: Path | None = None,
    *,
    memory: int | None = None,
    say: Say = lambda _: None,
) -> Corpus:
    """The tokens of the data, from the cache when they are there.

    With objective `pretrain` every token is learned; with `sft` only completions and what
    assistants wrote; with `dpo` only answers, document 2i being preferred to 2i + 1.
    memory: bytes that all processes of this command may hold; None: what the machine has. say:
    called with how far it is, where that takes a while.
    Raises InvalidRequest for what cannot be read (see `read_parts`) and for
    a document without tokens; RunFailed when the cache cannot be written.
    """
    root = (cache or cache_folder()) / "tokens"
    facts = [FORMAT, objective, tokenizer.fingerprint]
    facts += [part for s in sources.files for part in (s.kind, s.sha256)]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    folder = root / key
    if (found := _open(folder, key, sources.notes)) is not None:
        return found
    try:
        remove_abandoned(root)
        with claim(root / f".{key}"):
            if _open(folder, key, ()) is None:  # no other process was first
                _make(folder, sources, tokenizer, objective, memory, say)
            else:
                shutil.rmtree(root / f".{key}")
    except OSError as error:
        raise RunFailed(
            f"cannot write the token cache `{folder}`: {error.strerror}",
            hint="free space there, or set MEMFIT_CACHE to a folder with room",
        ) from None
    corpus = _open(folder, key, sources.notes)
    if corpus is None:
        raise RunFailed(f"the token cache `{folder}` vanished while it was read")
    return corpus


def _open(folder: Path, key: str, notes: tuple[str, ...]) -> Corpus | None:
    """The cached corpus; None when it is absent or is not what its meta.json says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in meta["files"]}
    except (OSError, ValueError, KeyError):
        return None
    if sizes != meta["files"]:
        return None

    def read(name: str, dtype: str) -> Array:
        return np.memmap(folder / name, dtype=dtype, mode="r")

    learned = read("learned.bin", "uint8") if "learned.bin" in sizes else None
    tokens, offsets = read("tokens.bin", meta["dtype"]), read("offsets.bin", "int64")
    return Corpus(tokens, offsets, learned, key, notes, folder)


def _make(
    folder: Path,
    sources: Sources,
    tokenizer: Tokenizer,
    objective: str,
    memory: int | None,
    say: Say,
) -> None:
    """Tokenise into the folder beside the target, which is held, and rename it.

    What is tokenised stays where this process is ended; nothing stays where the data has an error.
    """
    temporary = folder.with_name(f".{folder.name}")
    try:
        making = Making(temporary, tokenizer, _describe_making())
        shards = islice(enumerate(split(sources)), making.shards, None)
        size = sum(source.path.stat().st_size for source in sources.files)
        progress = Progress(making, size, say)
        with start_workers(size, tokenizer, objective, temporary, memory) as workers:
            if workers is None:
                for _, shard in shards:
                    making.append(encode_shard(shard, tokenizer, objective))
                    progress.look()
            else:
                for _ in workers.run(shards, making.find_parts(), making.shards):
                    making.append_part()
                    progress.look()
        if not making.documents:
            names = ", ".join(f"`{source.path}`" for source in sources.files[:3])
            raise InvalidRequest(f"{names}: no examples are in the data", hint="name other data")
        making.finish({"format": FORMAT})
        shutil.rmtree(folder, ignore_errors=True)  # damaged: it would be in the way
        temporary.rename(folder)
        (folder / "lock").unlink()
    except (InvalidRequest, OSError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class Progress:
    """Says how far the tokens of much data are, from time to time."""

    def __init__(self, making: Making, size: int, say: Say) -> None:
        self._making, self._say = making, say
        self._next = time.monotonic() + INTERVAL
        if size >= MUCH:
            before = f", {making.tokens:,} tokens of it are there" if making.tokens else ""
            say(f"tokenising {units.show_bytes(size)} of data{before}")

    def look(self) -> None:
        """Say it where it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL
            making = self._making
            self._say(f"tokenised {making.documents:,} documents, {making.tokens:,} tokens so far")


def _describe_making() -> dict[str, Any]:
    """What must be the same for tokens of an earlier process to be gone on from: where the data is
    cut, and how it is read."""
    return {"shard": SHARD, **{name: version(name) for name in ("tokenizers", "pyarrow")}}
