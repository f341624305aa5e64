"""The files of training data as the user has them: text, JSONL, parquet and CSV."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from memfit.core.cache_folder import cache_folder
from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.core.system.json_lists import find_records
from memfit.core.units import MIB
from memfit.train.data.formats import PLUGIN, name_kind_of
from memfit.train.data.hashes import Content, Hashes

KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip

FORMATS = "UTF-8 text, JSONL (one object a line), a JSON array of objects, parquet or CSV"


class Source(NamedTuple):
    """One file of the data, with the hash of its bytes."""

    path: Path
    kind: (
        str  # text | jsonl | json (an array) | parquet | csv, or a registered reader's (`formats`)
    )
    sha256: str


class Sources(NamedTuple):
    """The files of the data, in the order of their paths, and what was left out."""

    files: tuple[Source, ...]
    notes: tuple[str, ...]


def find_sources(data: str, cache: Path | None = None) -> Sources:
    """The files named by a path, a folder (with the folders in it) or a glob pattern.

    Hidden, empty and binary files are passed over inside a folder, and counted, and so are JSON
    documents, which describe data sets; a file that is named itself must be readable text. Files
    that have not changed since an earlier start are not read (see `hashes`). Raises
    InvalidRequest: nothing there, empty, binary.
    """
    if not data:
        raise InvalidRequest("no training data is named", hint="name it: `--data PATH`")
    path = Path(data).expanduser()
    hashes = Hashes(str(path), cache or cache_folder())
    if path.is_file():
        found = _named(path, hashes)
        hashes.remember()
        return Sources((found,), ())
    listed = _list(path, data)
    files, empty, binary, documents = [], 0, 0, 0
    for file in listed:
        digest, problem = _inspect(file, hashes)
        if file.stat().st_size == 0:
            empty += 1
        elif problem:
            binary += 1
        elif not _kind_of(file):
            documents += 1
        else:
            files.append(Source(file, _kind_of(file), digest))
    hashes.remember()
    if not files:
        raise InvalidRequest(
            f"`{data}` holds no text, JSONL, parquet or CSV file: "
            f"{len(listed)} files, {empty} empty, {binary} binary, {documents} JSON documents",
            hint=f"data is {FORMATS}",
        )
    notes = [f"{n} {what} passed over in `{data}`" for n, what in
             ((empty, "empty files"), (binary, "binary files"),
              (documents, "JSON documents, of which each is one object and no list of examples,"))
             if n]  # fmt: skip
    return Sources(tuple(files), tuple(notes))


def join_sources(found: Sequence[Sources]) -> Sources:
    """The files of several data sets, each file once, in their order."""
    files = {source.sha256: source for sources in found for source in sources.files}
    return Sources(tuple(files.values()), tuple(n for sources in found for n in sources.notes))


def _list(path: Path, data: str) -> list[Path]:
    """The files of a folder or a pattern, sorted."""
    if path.is_dir():
        return [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p, path)]
    if not glob.has_magic(data):
        _raise_missing(path, data)
    names = sorted(glob.glob(str(path), recursive=True))
    return [Path(n) for n in names if Path(n).is_file()]


def _inspect(path: Path, hashes: Hashes) -> Content:
    """The file's hash, and why it is not text (empty when it is, or is parquet)."""
    kind = _kind_of(path)
    return hashes.inspect(path, text=kind != "parquet" and not kind.startswith(PLUGIN))


def _hidden(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def _raise_missing(path: Path, data: str) -> NoReturn:
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, beside)
    hint = f"did you mean {near}?" if near else f"looked in `{path.parent.resolve()}`"
    raise InvalidRequest(f"no data at `{data}`", hint=hint)


def _named(path: Path, hashes: Hashes) -> Source:
    """A file that the user named himself: every reason not to use it is an error."""
    if path.stat().st_size == 0:
        raise InvalidRequest(f"`{path}` is empty", hint="name a file with text in it")
    digest, problem = _inspect(path, hashes)
    if problem:
        raise InvalidRequest(f"`{path}` {problem}", hint=f"data is {FORMATS}")
    if not (kind := _kind_of(path)):
        raise InvalidRequest(
            f"`{path}` is one JSON document, not examples", hint=f"data is {FORMATS}"
        )
    return Source(path, kind, digest)


def kind_of_json(path: Path) -> str:
    """`json` of an array of objects, `jsonl` of one object a line; "" of any other document."""
    with path.open("rb") as file:
        start = file.read(MIB).decode("utf-8", "ignore")
    return {"array": "json", "lines": "jsonl", "": ""}[find_records(start)]


def _kind_of(path: Path) -> str:
    """Of `Source`; "" of a JSON document that holds no examples."""
    if path.suffix.lower() == ".json":
        return kind_of_json(path)
    return KINDS.get(path.suffix.lower()) or name_kind_of(path) or "text"
