"""Training data as the user has it: text, JSONL and parquet files, read as examples.

An example is a text and the spans of it that are learned. Plain text is learned whole; of
`prompt` with `completion` the completion, and of `messages` what assistants wrote.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memfit.errors import InvalidRequest, did_you_mean
from memfit.train.tokenizer import Tokenizer
from memfit.units import MIB

COLUMNS = "`text`, `messages`, or `prompt` with `completion`"
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class Source(NamedTuple):
    """One file of the data, with the hash of its bytes."""

    path: Path
    kind: str  # text | jsonl | parquet
    sha256: str


class Sources(NamedTuple):
    """The files of the data, in the order of their paths, and what was left out."""

    files: tuple[Source, ...]
    notes: tuple[str, ...]


class Example(NamedTuple):
    """One document: its text, the characters that are learned, and where it stands."""

    text: str
    learned: tuple[tuple[int, int], ...] | None  # None: all of it
    closed: bool  # a start and an end of text are put around it; a chat template does its own
    where: str


def find_sources(data: str) -> Sources:
    """The files named by a path, a folder (with the folders in it) or a glob pattern.

    Hidden, empty and binary files are passed over inside a folder, and counted; a file that is
    named itself must be readable text. Raises InvalidRequest: nothing there, empty, binary.
    """
    if not data:
        raise InvalidRequest("no training data is named", hint="set `task.data`, a file or folder")
    path = Path(data).expanduser()
    if path.is_file():
        return Sources((_named(path),), ())
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p, path)]
    else:
        if not glob.has_magic(data):
            _raise_missing(path, data)
        names = sorted(glob.glob(str(path), recursive=True))
        found = [Path(n) for n in names if Path(n).is_file()]
    files, empty, binary = [], 0, 0
    for file in found:
        digest, problem = _inspect(file)
        if file.stat().st_size == 0:
            empty += 1
        elif problem:
            binary += 1
        else:
            files.append(Source(file, KINDS.get(file.suffix.lower(), "text"), digest))
    if not files:
        raise InvalidRequest(
            f"`{data}` holds no text, JSONL or parquet file: "
            f"{len(found)} files, {empty} empty, {binary} binary",
            hint="data is UTF-8 text, JSONL or parquet",
        )
    notes = [f"{n} {what} passed over in `{data}`" for n, what in
             ((empty, "empty files"), (binary, "binary files")) if n]  # fmt: skip
    return Sources(tuple(files), tuple(notes))


def _hidden(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def _raise_missing(path: Path, data: str) -> None:
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, beside)
    hint = f"did you mean {near}?" if near else f"looked in `{path.parent.resolve()}`"
    raise InvalidRequest(f"no data at `{data}`", hint=hint)


def _named(path: Path) -> Source:
    """A file that the user named himself: every reason not to use it is an error."""
    if path.stat().st_size == 0:
        raise InvalidRequest(f"`{path}` is empty", hint="name a file with text in it")
    if path.suffix.lower() == ".json":
        raise InvalidRequest(
            f"`{path}` is one JSON document, not examples",
            hint="write one object a line, as JSONL (`jq -c '.[]'` splits an array)",
        )
    digest, problem = _inspect(path)
    if problem:
        raise InvalidRequest(f"`{path}` {problem}", hint="data is UTF-8 text, JSONL or parquet")
    return Source(path, KINDS.get(path.suffix.lower(), "text"), digest)


def _inspect(path: Path) -> tuple[str, str]:
    """SHA-256 of the file's bytes, and why it is not text (empty when it is, or is parquet)."""
    digest, problem = hashlib.sha256(), ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    check = KINDS.get(path.suffix.lower()) != "parquet"
    try:
        with path.open("rb") as file:
            while chunk := file.read(MIB):
                digest.update(chunk)
                if check and not problem:
                    try:
                        decoder.decode(chunk)
                        problem = "is a binary file" if b"\0" in chunk else ""
                    except UnicodeDecodeError as error:
                        byte = error.object[error.start]
                        problem = f"is not UTF-8 text: it holds the byte 0x{byte:02x}"
    except OSError as error:
        raise InvalidRequest(f"cannot read `{path}`: {error.strerror}") from None
    return digest.hexdigest(), problem


def read_examples(sources: Sources, tokenizer: Tokenizer | None) -> Iterator[Example]:
    """Every example in order. `messages` need the tokenizer's chat template.

    Raises InvalidRequest, naming file and line (or row): a broken line, no usable column, a
    wrong type, an empty text.
    """
    for source in sources.files:
        if source.kind == "text":
            text = source.path.read_text(encoding="utf-8", errors="strict")
            yield Example(text, None, True, f"`{source.path}`")
        else:
            records = _jsonl(source.path) if source.kind == "jsonl" else _parquet(source.path)
            for where, record in records:
                yield _example(record, where, tokenizer)


def read_texts(sources: Sources) -> Iterator[str]:
    """The texts alone, to train a tokenizer on; of conversations, what each message says."""
    for source in sources.files:
        if source.kind == "text":
            yield source.path.read_text(encoding="utf-8", errors="strict")
            continue
        records = _jsonl(source.path) if source.kind == "jsonl" else _parquet(source.path)
        for where, record in records:
            if "messages" in record:
                yield from (m["content"] for m in _messages(record["messages"], where))
            else:
                yield _example(record, where, None).text


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"`{path}` line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InvalidRequest(
                    f"{where} is not JSON: {error}", hint="write one JSON object a line"
                ) from None
            if not isinstance(record, dict):
                raise InvalidRequest(
                    f"{where} holds a {type(record).__name__}, not an object",
                    hint='for example {"text": "..."}',
                )
            yield where, record


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = [n for n in file.schema_arrow.names
                 if n in {"text", "messages", "prompt", "completion"}]  # fmt: skip
        if not names:
            _raise_no_column(f"`{path}`", file.schema_arrow.names)
        row = 0
        for batch in file.iter_batches(columns=names, batch_size=1024):
            for record in batch.to_pylist():
                row += 1
                yield f"`{path}` row {row}", record
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise InvalidRequest(f"cannot read `{path}` as parquet: {first}") from None


def _raise_no_column(where: str, names: Sequence[str]) -> None:
    held = ", ".join(names) or "nothing"
    raise InvalidRequest(f"{where} has no column to train on: {held}", hint=f"use {COLUMNS}")


def _example(record: Mapping[str, Any], where: str, tokenizer: Tokenizer | None) -> Example:
    if record.get("messages") is not None:
        messages = _messages(record["messages"], where)
        if tokenizer is None:
            raise InvalidRequest(f"{where}: `messages` need a tokenizer with a chat template")
        try:
            text, spans = tokenizer.chat(messages)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error.message}", hint=error.hint) from None
        return Example(text, tuple(spans), False, where)
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt = _text(record, "prompt", where)
        text = prompt + _text(record, "completion", where)
        return Example(text, ((len(prompt), len(text)),), True, where)
    if record.get("text") is not None:
        return Example(_text(record, "text", where), None, True, where)
    _raise_no_column(where, list(record))
    raise AssertionError  # unreachable


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: `{key}` is a {type(value).__name__}, not a text")
    if not value and key != "prompt":
        raise InvalidRequest(f"{where}: `{key}` is empty", hint="leave such examples out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{where}: `{key}` holds half a surrogate pair") from None
    return value


def _messages(value: object, where: str) -> list[dict[str, Any]]:
    good = isinstance(value, list) and value and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )  # fmt: skip
    if not good:
        raise InvalidRequest(
            f"{where}: `messages` is not a list of role and content",
            hint='for example [{"role": "user", "content": "Hi"}, …]',
        )
    assert isinstance(value, list)
    return value
