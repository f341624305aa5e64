"""Training data as a request names it, for tools that read it themselves: where, and of what kind.

A tool is started from the folder of its files, so that every file of this machine is named by its
whole path. Formats are distinguished as by `memfit train`: by the keys of the first record.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from memfit.core.errors import InvalidRequest
from memfit.core.system.json_lists import ListError, find_records, read_list
from memfit.core.system.reading import is_file, is_folder, parse_json
from memfit.core.units import MIB
from memfit.objectives import find_objective
from memfit.records import Record
from memfit.records.habits.mixture import read_mixture
from memfit.records.request import Task

PLACEHOLDER = "YOUR_DATASET"
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# keys that a record of each shape has, the most telling first
SHAPES: dict[str, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected"), "messages": ("messages",),
    "conversations": ("conversations",), "alpaca": ("instruction", "output"),
    "answers": ("prompt", "completion"), "text": ("text",),
}  # fmt: skip
MOST_FILES = 1000  # that are named one by one
Shape = Literal["", "pairs", "messages", "conversations", "alpaca", "answers", "text"]


class Part(Record, frozen=True, kw_only=True):
    """Files of one kind whose records have one shape."""

    kind: Literal["text", "jsonl", "parquet"]
    shape: Shape  # "": not known
    files: tuple[str, ...]  # whole paths
    keys: frozenset[str]  # of the first record; of text, `text`
    nested: bool = False  # pairs: the answers are lists of messages, not texts


class Weighted(Record, frozen=True, kw_only=True):
    """One data set of several with weights."""

    named: str
    share: float  # of the rows
    files: tuple[str, ...]  # whole paths; () of the hub


class Data(Record, frozen=True, kw_only=True):
    """What is trained on: a placeholder, a name on the hub, or files of this machine."""

    named: str
    parts: tuple[Part, ...]  # () of a placeholder, and of the hub
    weighted: tuple[Weighted, ...] = ()  # of several with weights, whose parts are in this order

    @property
    def here(self) -> bool:
        """Whether it is files of this machine."""
        return bool(self.parts)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Of all parts, each once."""
        return tuple(dict.fromkeys(part.shape for part in self.parts))


def read_data(named: str) -> Data:
    """The data that a request names, looked at but not read.

    Raises InvalidRequest for a file or folder that is not here, and one that holds no data.
    """
    mixture = read_mixture(named)
    if not mixture:
        return _read_one(named)
    found = [_read_one(part.path) for part in mixture]
    return Data(
        named=named,
        parts=tuple(part for data in found for part in data.parts),
        weighted=tuple(
            Weighted(
                named=part.path, share=part.share,
                files=tuple(file for own in data.parts for file in own.files),
            )
            for part, data in zip(mixture, found, strict=True)
        ),
    )  # fmt: skip


def _read_one(named: str) -> Data:
    if not named:
        return Data(named=PLACEHOLDER, parts=())
    path = Path(named).expanduser()
    if is_file(path):
        files = [path]
    elif is_folder(path):
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _passed_over(p, path)]
    elif found := sorted(glob.glob(str(path), recursive=True)):
        files = [Path(name) for name in found if is_file(Path(name))]
    elif _on_the_hub(named):
        return Data(named=named, parts=())
    else:
        raise InvalidRequest(f"no data at `{named}`", hint=f"looked in `{path.parent.resolve()}`")
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise InvalidRequest(f"`{named}` holds no file with data in it")
    if len(files) > MOST_FILES:
        raise InvalidRequest(
            f"`{named}` holds {len(files):,} files, and an export names up to {MOST_FILES:,}",
            hint="join them, for example as one JSONL or parquet file",
        )
    parts: dict[tuple[str, str, bool], list[Part]] = {}
    for file in files:
        part = _look_at(file)
        parts.setdefault((part.kind, part.shape, part.nested), []).append(part)
    return Data(
        named=str(path.resolve()),
        parts=tuple(
            Part(
                kind=first.kind, shape=first.shape, nested=first.nested, keys=first.keys,
                files=tuple(file for part in same for file in part.files),
            )
            for same in parts.values() if (first := same[0])
        ),
    )  # fmt: skip


def _on_the_hub(named: str) -> bool:
    """`owner/name`, or a single word without an ending."""
    words = named.split("/")
    plain = all(word and not word.startswith((".", "~")) for word in words)
    return len(words) <= 2 and plain and Path(named).suffix.lower() not in (*KINDS, ".txt", ".json")


def _passed_over(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def _look_at(file: Path) -> Part:
    whole = str(file.resolve())
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"the name of {whole!r} is not UTF-8, and the files of a tool are",
            hint="rename the file",
        ) from None
    kind = KINDS.get(file.suffix.lower(), "text")
    array = False
    if file.suffix.lower() == ".json" and (layout := _find_layout(file)):
        kind, array = "jsonl", layout == "array"  # which the tools read with the same loader
    if kind == "text":
        keys, nested = frozenset({"text"}), False
    elif kind == "jsonl":
        keys, nested = _first_record(file, array=array)
    else:
        keys, nested = _columns(file), False
    shape = next((s for s, wanted in SHAPES.items() if keys >= {*wanted}), "")
    return Part(kind=kind, shape=shape, files=(whole,), keys=keys, nested=nested)  # type: ignore[arg-type]


def _find_layout(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as text:
        return find_records(text.read(MIB))


def _first_record(file: Path, *, array: bool) -> tuple[frozenset[str], bool]:
    """Its keys, and whether its preferred answer is a list of messages."""
    hint = "one object a line, or an array of objects"
    try:
        with file.open(encoding="utf-8") as text:
            found = read_list(text.read) if array else (line for line in text if line.strip())
            line = next(found, "{}")
    except (OSError, UnicodeDecodeError, ListError) as error:
        raise InvalidRequest(f"cannot read `{file}`: {error}", hint=hint) from None
    record = parse_json(line, source=f"the first record of `{file}`", hint=hint)
    if not isinstance(record, dict):
        raise InvalidRequest(f"`{file}` begins with {type(record).__name__}, not a JSON object")
    return frozenset(key for key in record if record[key] is not None), isinstance(
        record.get("chosen"), list
    )


def _columns(file: Path) -> frozenset[str]:
    """Of a parquet file; none where nothing here reads it."""
    try:
        import pyarrow.parquet
    except ImportError:
        return frozenset()
    return frozenset(pyarrow.parquet.read_schema(file).names)


def load_with(part: Part) -> str:
    """The name that Hugging Face's `datasets` has for what reads the files."""
    return {"jsonl": "json", "parquet": "parquet", "text": "text"}[part.kind]


def as_patterns(part: Part) -> list[str]:
    """Return the files as patterns, which is what `datasets` takes names for."""
    return [glob.escape(file) for file in part.files]


def refuse_patterns(data: Data, tool: str) -> None:
    """Raise InvalidRequest for names that a tool looks up as they are and then gives to `datasets`,
    which takes them for patterns."""
    for file in (file for part in data.parts for file in part.files):
        if glob.has_magic(file):
            raise InvalidRequest(
                f"`{file}` holds one of * ? [, which `{tool}` takes for a pattern",
                hint="rename the file or its folder",
            )


def refuse_weights(data: Data, tool: str) -> None:
    """Raise InvalidRequest for data sets with weights, for a tool that joins data sets whole."""
    if data.weighted:
        raise InvalidRequest(
            f"`task.data: {data.named}` gives its data sets shares of the rows, and `{tool}` joins"
            " data sets whole",
            hint="`--to llamafactory` writes `interleave_probs`; or join them in one file",
        )


def refuse_shapes(data: Data, known: tuple[str, ...], objective: str, tool: str) -> None:
    """Raise InvalidRequest for records that a tool does not train on under the objective."""
    wanted = ("pairs",) if find_objective(objective).compares else known
    for part in data.parts:
        if part.shape and part.shape not in wanted:
            found = ", ".join(f"`{key}`" for key in SHAPES[part.shape])
            raise InvalidRequest(
                f"`{part.files[0]}` has {found}, which `{tool}` does not train on under"
                f" `objective: {objective}`",
                hint="it reads " + "; ".join(", ".join(SHAPES[shape]) for shape in wanted),
            )


def read_notes(data: Data, objective: str) -> tuple[str, ...]:
    """What to know of the data before one starts."""
    found = []
    if not data.here:
        none = data.named == PLACEHOLDER
        missing = "the request names none; put yours in its place: " if none else ""
        usual = {"pretrain": "text"}.get(objective, "messages")
        wanted = "chosen, rejected" if find_objective(objective).pairs else usual
        found.append(f"data: `{data.named}`: {missing}its records need {wanted}")
    if any(part.kind == "text" for part in data.parts):
        found.append("data: the tool takes each line of a text file for a document of its own")
    return tuple(found)


def write_conversations(
    task: Task, tool: str, *, template: str = "", learns: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A tool's keys for `task.chat_template`, whose file it takes under the name `template`, and
    for `task.learns`, of which `learns` has what it writes.

    Raises InvalidRequest where the tool has no word for one: it decides what is learned.
    """
    values: dict[str, Any] = {}
    if task.chat_template and task.objective != "pretrain":
        if not template:
            raise InvalidRequest(
                f"`task.chat_template` is set, and `{tool}` takes the tokenizer's own",
                hint="save it in the tokenizer's folder as `chat_template.jinja`, and leave the key"
                " out",
            )
        if not is_file(Path(task.chat_template).expanduser()):
            raise InvalidRequest(
                f"`task.chat_template` is a text, and `{tool}` reads a file",
                hint="save it as a file, and name that",
            )
        values[template] = str(Path(task.chat_template).expanduser().resolve())
    if task.learns != "answers" and task.objective == "sft":
        if task.learns not in learns:
            raise InvalidRequest(
                f"`task.learns: {task.learns}` decides what is learned, and `{tool}` has no word"
                " for it",
                hint=f"one of: answers, {', '.join(learns)}",
            )
        values |= learns[task.learns]
    return values
