"""Training data as the user has it: text, JSONL, parquet and CSV files, read as examples.

An example is a text and the spans of it that are learned: see `conversations`. Plain text is
learned whole; of a prompt with its answer the answer, and of a chat what assistants wrote.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.core.system.reading import name_kind, parse_json
from memfit.core.units import MIB
from memfit.train.data.conversations import KEYS, Example, read_record, refuse_columns, texts_of
from memfit.train.data.tokenizer import Tokenizer

KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip

FORMATS = "UTF-8 text, JSONL (one object a line), parquet or CSV"


class Source(NamedTuple):
    """One file of the data, with the hash of its bytes."""

    path: Path
    kind: str  # text | jsonl | parquet | csv
    sha256: str


class Sources(NamedTuple):
    """The files of the data, in the order of their paths, and what was left out."""

    files: tuple[Source, ...]
    notes: tuple[str, ...]


def find_sources(data: str) -> Sources:
    """The files named by a path, a folder (with the folders in it) or a glob pattern.

    Hidden, empty and binary files are passed over inside a folder, and counted, and so are JSON
    documents, which describe data sets; a file that is named itself must be readable text. Raises
    InvalidRequest: nothing there, empty, binary.
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
    files, empty, binary, documents = [], 0, 0, 0
    for file in found:
        digest, problem = _inspect(file)
        if file.stat().st_size == 0:
            empty += 1
        elif file.suffix.lower() == ".json":
            documents += 1
        elif problem:
            binary += 1
        else:
            files.append(Source(file, KINDS.get(file.suffix.lower(), "text"), digest))
    if not files:
        raise InvalidRequest(
            f"`{data}` holds no text, JSONL, parquet or CSV file: "
            f"{len(found)} files, {empty} empty, {binary} binary, {documents} JSON documents",
            hint=f"data is {FORMATS}",
        )
    notes = [f"{n} {what} passed over in `{data}`" for n, what in
             ((empty, "empty files"), (binary, "binary files"),
              (documents, "JSON documents, of which each is one object and no list of examples,"))
             if n]  # fmt: skip
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
        raise InvalidRequest(f"`{path}` {problem}", hint=f"data is {FORMATS}")
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


def read_examples(
    sources: Sources, tokenizer: Tokenizer | None, objective: str = "pretrain"
) -> Iterator[Example]:
    """Every example in order; under `dpo` each record is two. Chats need the tokenizer's template.

    Raises InvalidRequest, naming file and line (or row): a broken line, no usable column, a
    wrong type, an empty text (see `conversations`).
    """
    for place, record in _records(sources):
        yield from read_record(record, place, tokenizer, objective)


def read_texts(sources: Sources) -> Iterator[str]:
    """The texts alone, to train a tokenizer on; of conversations, what each message says."""
    for place, record in _records(sources):
        yield from texts_of(record, place)


def _records(sources: Sources) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each record stands, and the record; a text file is one."""
    for source in sources.files:
        if source.kind == "text":
            text = source.path.read_text(encoding="utf-8", errors="strict")
            yield f"`{source.path}`", {"text": text}
        else:
            yield from READERS[source.kind](source.path)


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"`{path}` line {number}"
            record = parse_json(line, source=place, hint="write one JSON object a line")
            if not isinstance(record, dict):
                raise InvalidRequest(
                    f"{place} holds {name_kind(record)}, not an object",
                    hint='for example {"text": "..."}',
                )
            yield place, record


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = _find_columns(path, file.schema_arrow.names)
        yield from _rows(path, file.iter_batches(columns=names, batch_size=1024))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        _refuse_table(path, "parquet", error)


def _csv(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A table of texts, whose first line names the columns; a text may have line breaks."""
    import pyarrow
    from pyarrow import csv

    parse = csv.ParseOptions(
        delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True
    )
    try:
        with csv.open_csv(path, parse_options=parse) as file:
            names = _find_columns(path, file.schema.names)
        # numbers and dates are texts, too, as they stand
        convert = csv.ConvertOptions(
            include_columns=names, column_types=dict.fromkeys(names, pyarrow.string())
        )
        with csv.open_csv(path, parse_options=parse, convert_options=convert) as file:
            yield from _rows(path, file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        _refuse_table(path, "CSV", error)


READERS = {"jsonl": _jsonl, "parquet": _parquet, "csv": _csv}


def _find_columns(path: Path, held: list[str]) -> list[str]:
    """The columns of a table that say something; InvalidRequest where none does."""
    names = [name for name in held if name in KEYS]
    if not names:
        refuse_columns(f"`{path}`", held)
    return names


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    row = 0
    for batch in batches:
        for record in batch.to_pylist():
            row += 1
            yield f"`{path}` row {row}", record


def _refuse_table(path: Path, kind: str, error: Exception) -> NoReturn:
    first = str(error).splitlines()[0]
    raise InvalidRequest(f"cannot read `{path}` as {kind}: {first}") from None
