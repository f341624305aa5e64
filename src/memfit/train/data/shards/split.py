"""The data in shards of a few MiB, in order: what one process tokenises at a time.

A shard is a list of items: as much of a text as it holds, whole lines of JSONL, or rows of a table.
Whoever cuts the files does no more than that (`split`); whoever has a shard reads its records
(`read_parts`). The same files are always cut at the same places.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from memfit.core.errors import InvalidRequest
from memfit.core.system.json_lists import ListError, read_list
from memfit.core.system.reading import name_kind, parse_json
from memfit.core.units import KIB, MIB
from memfit.train.data.conversations import (
    KEYS,
    Content,
    read_record,
    refuse_columns,
    texts_of,
)
from memfit.train.data.formats import PLUGIN, read_lines
from memfit.train.data.readers import Source, Sources
from memfit.train.data.tokenizer import Tokenizer

SHARD = 4 * MIB  # bytes
PIECE = MIB  # characters: a longer text is encoded in pieces, or it would fill memory
LEARNED = 64 * KIB  # characters of a text that a tokenizer learns from at a time
TALKS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
ROWS = 1024  # of a table, at most, that are read at once
Records = Iterator[tuple[str, Mapping[str, Any]]]


class Text(NamedTuple):
    """A text file, or a piece of it."""

    path: Path
    text: str
    opens: bool  # the file begins here
    closes: bool  # the file ends here

    @property
    def size(self) -> int:
        """About as many bytes."""
        return len(self.text)


class Lines(NamedTuple):
    """Whole lines of a JSONL file, or elements of a JSON array, each as a line."""

    path: Path
    first: int  # the number of the first one, from 1
    content: bytes
    word: str = "line"  # what one is called where it is wrong

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content)

    def records(self) -> Records:
        """Where each record stands, and the record."""
        encoding = "utf-8-sig" if self.first == 1 else "utf-8"
        lines = io.TextIOWrapper(io.BytesIO(self.content), encoding=encoding)
        for number, line in enumerate(lines, self.first):
            if not line.strip():
                continue
            place = f"`{self.path}` {self.word} {number}"
            record = parse_json(line, source=place, hint="write one JSON object a line")
            if not isinstance(record, dict):
                raise InvalidRequest(
                    f"{place} holds {name_kind(record)}, not an object",
                    hint='for example {"text": "..."}',
                )
            yield place, record


class Table(NamedTuple):
    """Rows of a parquet or CSV file, as a stream of Arrow."""

    path: Path
    first: int  # the number of the first one, from 1
    content: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content)

    def records(self) -> Records:
        """Where each record stands, and the record."""
        import pyarrow

        row = self.first
        with pyarrow.ipc.open_stream(self.content) as stream:
            for batch in stream:
                try:
                    records = batch.to_pylist()
                except UnicodeDecodeError as error:
                    kind = "CSV" if self.path.suffix.lower() in (".csv", ".tsv") else "parquet"
                    _refuse_table(self.path, kind, error)
                for record in records:
                    yield f"`{self.path}` row {row}", _leave_out_filled(record)
                    row += 1


def _leave_out_filled(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what a table fills up in the arguments of calls and in tools, where only other rows
    have such a key (`remove_none_values` of TRL)."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(held) for key, held in value.items() if held is not None}
        return [walk(held) for held in value] if isinstance(value, list) else value

    def walk_message(message: Any) -> Any:  # whose own keys `read_messages` looks at
        whole = isinstance(message, dict)
        return {key: walk(held) for key, held in message.items()} if whole else walk(message)

    return {
        key: [walk_message(m) for m in value] if key in TALKS and isinstance(value, list) else value
        for key, value in record.items()
    }


Item = Text | Lines | Table


class Part(NamedTuple):
    """A document, or as much of one as a shard holds."""

    content: Content
    place: str
    opens: bool = True
    closes: bool = True


def split(sources: Sources) -> Iterator[tuple[Item, ...]]:
    """The shards of the data, in order.

    Raises InvalidRequest for a table that cannot be read, or has no column to train on.
    """
    items: list[Item] = []
    size = 0
    for source in sources.files:
        for item in _split(source):
            items.append(item)
            size += item.size
            if size >= SHARD:
                yield tuple(items)
                items, size = [], 0
    if items:
        yield tuple(items)


def read_parts(
    shard: Iterable[Item], tokenizer: Tokenizer | None, objective: str
) -> Iterator[Part]:
    """The documents of a shard, in order; under `dpo` each record is two.

    Raises InvalidRequest, naming file and line (or row): a broken line, no usable column, a
    wrong type, an empty text (see `conversations`).
    """
    for item in shard:
        if isinstance(item, Text):
            place = f"`{item.path}`"
            for content in read_record({"text": item.text}, place, tokenizer, objective):
                yield Part(content, place, item.opens, item.closes)
        else:
            for place, record in item.records():
                for content in read_record(record, place, tokenizer, objective):
                    yield Part(content, place)


def read_texts(sources: Sources) -> Iterator[str]:
    """The texts alone, to train a tokenizer on; of conversations, what each message says."""
    for source in sources.files:
        if source.kind == "text":
            yield from _words(source.path)
            continue
        for item in _split(source):
            assert not isinstance(item, Text)
            for place, record in item.records():
                yield from texts_of(record, place)


def read_rows(sources: Sources) -> Records:
    """Where each record stands, and the record with all its columns; a text file is refused."""
    for source in sources.files:
        for item in _split(source):
            if isinstance(item, Text):
                raise InvalidRequest(
                    f"`{item.path}` is text, which does not say where a prompt ends",
                    hint='use JSONL, one `{"prompt": …}` a line',
                )
            yield from item.records()


def _words(path: Path) -> Iterator[str]:
    """A text in pieces that end between a letter and a space, where two words always part."""
    with path.open(encoding="utf-8", errors="strict") as file:
        text = ""
        while more := file.read(LEARNED):
            text += more
            for at in range(len(text) - 1, len(text) - len(more), -1):
                if text[at].isspace() and text[at - 1].isalpha():
                    yield text[:at]
                    text = text[at:]
                    break
        if text:
            yield text


def _text(source: Source) -> Iterator[Item]:
    """Pieces that end at the end of a line where there is one."""
    with source.path.open(encoding="utf-8", errors="strict") as file:
        opens, text = True, file.read(PIECE + 1)
        while len(text) > PIECE:
            stop = text.rfind("\n", 0, PIECE) + 1 or PIECE
            yield Text(source.path, text[:stop], opens, False)
            opens, text = False, text[stop:] + file.read(stop)
        yield Text(source.path, text, opens, True)


def _jsonl(source: Source) -> Iterator[Item]:
    first, held = 1, bytearray()
    with source.path.open("rb") as file:
        while chunk := file.read(SHARD):
            stop = chunk.rfind(b"\n") + 1
            if not stop:  # the last byte may be half a line's end
                stop = chunk.rfind(b"\r", 0, -1) + 1
            if not stop:
                held += chunk
                continue
            content = bytes(held) + chunk[:stop]
            yield Lines(source.path, first, content)
            first += _count_lines(content)
            held = bytearray(chunk[stop:])
    if held:
        yield Lines(source.path, first, bytes(held))


def _json(source: Source) -> Iterator[Item]:
    """The elements of an array: a JSON text may have line breaks between its tokens alone."""
    path, first, count, held = source.path, 1, 0, bytearray()
    try:
        with path.open(encoding="utf-8", errors="strict") as file:
            for text in read_list(file.read):
                held += text.replace("\r", " ").replace("\n", " ").encode() + b"\n"
                count += 1
                if len(held) >= SHARD:
                    yield Lines(path, first, bytes(held), "example")
                    first, count, held = first + count, 0, bytearray()
    except ListError as error:
        raise InvalidRequest(
            f"`{path}` example {error.number}: {error.problem}",
            hint="write one array of objects, or one object a line",
        ) from None
    if not count and first == 1:
        raise InvalidRequest(f"`{path}` is an empty array", hint="name a file with examples in it")
    if held:
        yield Lines(path, first, bytes(held), "example")


def _count_lines(content: bytes) -> int:
    """Ends of lines, as Python's own text files have them: LF, CR, or both."""
    return content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n")


def _parquet(source: Source) -> Iterator[Item]:
    import pyarrow
    import pyarrow.parquet

    path = source.path
    try:
        # pages are read as they are needed: a group of rows may be larger than memory
        with pyarrow.parquet.ParquetFile(path, buffer_size=MIB) as file:
            names = _find_columns(path, file.schema_arrow.names)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            count = max(1, min(ROWS, SHARD * file.metadata.num_rows // max(1, size)))
            yield from _rows(path, file.iter_batches(columns=names, batch_size=count))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        _refuse_table(path, "parquet", error)


def _csv(source: Source) -> Iterator[Item]:
    """A table of texts, whose first line names the columns; a text may have line breaks."""
    import pyarrow
    from pyarrow import csv

    path = source.path
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


SPLITTERS = {"text": _text, "jsonl": _jsonl, "json": _json, "parquet": _parquet, "csv": _csv}


def _split(source: Source) -> Iterator[Item]:
    """The items of one file."""
    if source.kind.startswith(PLUGIN):
        return _plugin(source)
    return SPLITTERS[source.kind](source)


def _plugin(source: Source) -> Iterator[Item]:
    """Records of another package's reader, as lines of JSONL: a line is a record."""
    first, count, held = 1, 0, bytearray()
    for line in read_lines(source.path):
        held += line
        count += 1
        if len(held) >= SHARD:
            yield Lines(source.path, first, bytes(held))
            first, count, held = first + count, 0, bytearray()
    if held:
        yield Lines(source.path, first, bytes(held))


def _find_columns(path: Path, held: list[str]) -> list[str]:
    """The columns of a table that say something; InvalidRequest where none does.

    Beside a prompt alone all do: reward functions read them.
    """
    if "prompt" in held and not {"completion", "chosen"} & {*held}:
        return held
    names = [name for name in held if name in KEYS]
    if not names:
        refuse_columns(f"`{path}`", held)
    return names


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[Item]:
    import pyarrow

    row = 1
    for batch in batches:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield Table(path, row, sink.getvalue().to_pybytes())
        row += batch.num_rows


def _refuse_table(path: Path, kind: str, error: Exception) -> NoReturn:
    first = str(error).splitlines()[0]
    raise InvalidRequest(f"cannot read `{path}` as {kind}: {first}") from None
