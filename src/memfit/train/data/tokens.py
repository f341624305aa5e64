"""The data as token ids: tokenised once, in a memory-mapped cache named by its content.

    <cache>/<key>/tokens.bin    ids of all documents, uint16 or uint32
                  offsets.bin   int64, documents + 1: where each document begins
                  learned.bin   uint8 per token, 1 where it is learned; absent when all are
                  meta.json     sizes of the above and what was left out

The key covers the files' bytes, the tokenizer and what is learned. A folder appears complete, by
one rename, or not at all; two processes that write the same key agree on either's result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from memfit.core.cache_folder import cache_folder
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.units import DAY, MIB
from memfit.train.data.conversations import Example
from memfit.train.data.readers import Sources, read_examples
from memfit.train.data.tokenizer import Tokenizer

FORMAT = 2  # part of the key: another way to tokenise or to store makes another cache

Array = np.ndarray[Any, np.dtype[Any]]


class Corpus(NamedTuple):
    """Token ids of all documents, one after the other, and where each begins."""

    tokens: Array  # (tokens,) uint16 or uint32
    offsets: Array  # (documents + 1,) int64
    learned: Array | None  # (tokens,) uint8; None: every token is learned
    digest: str  # names the content: the cache's key
    notes: tuple[str, ...]  # what was passed over, for the user to read

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """(documents,) tokens of each document."""
        return np.diff(self.offsets)


def read_corpus(
    sources: Sources, tokenizer: Tokenizer, objective: str, cache: Path | None = None
) -> Corpus:
    """The tokens of the data, from the cache when they are there.

    With objective `pretrain` every token is learned; with `sft` only completions and what
    assistants wrote; with `dpo` only answers, document 2i being preferred to 2i + 1.
    Raises InvalidRequest for what cannot be read (see `read_examples`) and for
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
        _write(folder, read_examples(sources, tokenizer, objective), tokenizer, objective)
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
    return Corpus(tokens, offsets, learned, key, notes)


def _write(folder: Path, examples: Iterable[Example], tokenizer: Tokenizer, objective: str) -> None:
    """Tokenise into a folder beside the target and rename it; leaves nothing when it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        dtype = "uint16" if tokenizer.vocab <= np.iinfo("uint16").max + 1 else "uint32"
        masked = _write_arrays(temporary, examples, tokenizer, objective, dtype)
        if not masked:
            (temporary / "learned.bin").unlink()
        files = {p.name: p.stat().st_size for p in sorted(temporary.iterdir())}
        meta = temporary / "meta.json"
        meta.write_text(json.dumps({"format": FORMAT, "dtype": dtype, "files": files}))
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists() and _open(folder, "", ()) is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged: it would be in the way
        with contextlib.suppress(OSError):  # another process was first; its result is equal
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_arrays(
    folder: Path, examples: Iterable[Example], tokenizer: Tokenizer, objective: str, dtype: str
) -> bool:
    """Write tokens, offsets and learned flags; whether any token is not learned."""
    masked, total = False, 0
    with contextlib.ExitStack() as stack:

        def create(name: str) -> BinaryIO:
            return stack.enter_context((folder / name).open("wb"))

        tokens, offsets, learned = (
            create(f"{name}.bin") for name in ("tokens", "offsets", "learned")
        )
        offsets.write(np.int64(0).tobytes())
        for ids, flags in _tokenise(examples, tokenizer, objective):
            total += len(ids)
            tokens.write(np.asarray(ids, dtype=dtype).tobytes())
            offsets.write(np.int64(total).tobytes())
            if flags is None:
                flags = np.ones(len(ids), dtype="uint8")
            masked = masked or not flags.all()
            learned.write(flags.tobytes())
    return masked


def _tokenise(
    examples: Iterable[Example], tokenizer: Tokenizer, objective: str
) -> Iterator[tuple[list[int], Array | None]]:
    """Ids and learned flags (None: all) of each example, in order."""
    for group in _groups(examples):
        whole = [objective == "pretrain" or e.learned is None for e in group]
        texts = [e.text for e, plain in zip(group, whole, strict=True) if plain]
        plain_ids = iter(_encode(texts, tokenizer))
        for example, plain in zip(group, whole, strict=True):
            flags: Array | None = None
            if plain:
                ids = next(plain_ids)
            else:
                ids, flags = _encode_learned(example, tokenizer, objective)
            if not ids:
                raise InvalidRequest(f"{example.where} has no tokens", hint="leave it out")
            if example.closed:
                end = [] if tokenizer.end is None else [tokenizer.end]
                ids = [*tokenizer.start, *ids, *end]
                if flags is not None:
                    flags = np.pad(flags, (len(tokenizer.start), 0))
                    flags = np.pad(flags, (0, len(end)), constant_values=1)
            yield ids, flags


def _groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Examples in groups of about a MiB of text: enough for every core, little to hold."""
    group: list[Example] = []
    size = 0
    for example in examples:
        group.append(example)
        size += len(example.text)
        if size >= MIB:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each text. One of more than a MiB is cut at line ends, or it would fill memory."""
    if all(len(text) <= MIB for text in texts):
        return tokenizer.encode_many(texts)
    found = []
    for text in texts:
        ids: list[int] = []
        start = 0
        while start < len(text):
            stop = start + MIB
            line = text.rfind("\n", start, stop) + 1
            stop = line if line > 0 and stop < len(text) else stop
            ids += tokenizer.encode(text[start:stop])
            start = stop
        found.append(ids)
    return found


def _encode_learned(
    example: Example, tokenizer: Tokenizer, objective: str
) -> tuple[list[int], Array]:
    """Ids of a text with prompts, and 1 for each that belongs to a learned span.

    A prompt and its completion are encoded separately, as in generation. A conversation is encoded
    whole: its template's marks separate the turns.
    """
    spans = example.learned or ()
    if example.closed:
        edge = spans[0][0]
        prompt, answer = tokenizer.encode_many([example.text[:edge], example.text[edge:]])
        ids = prompt + answer
        flags = np.repeat(np.array([0, 1], dtype="uint8"), [len(prompt), len(answer)])
    else:
        ids, offsets = tokenizer.encode_with_offsets(example.text)
        begins = np.array([begin for begin, _ in offsets], dtype="int64")
        flags = np.zeros(len(ids), dtype="uint8")
        for begin, end in spans:
            flags[(begins >= begin) & (begins < end)] = 1
    if not flags.any():
        raise InvalidRequest(
            f"{example.where} has no answer to learn",
            hint=f"objective: {objective} needs a completion, or a message of the role `assistant`",
        )
    return ids, flags


def _remove_abandoned(root: Path) -> None:
    """Delete what a killed process left half written more than a day ago."""
    for path in root.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                shutil.rmtree(path, ignore_errors=True)
