"""About how many tokens and records a run's data has, without tokenising it: sizes of files.

A tokenizer that lies beside the model, or that the request names, says how many bytes one of
its tokens has, on a sample; without one that is assumed. `memfit train` counts exactly.
"""

from __future__ import annotations

import glob
import io
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core import units
from memfit.core.system.json_lists import ListError, find_records, read_list
from memfit.core.system.reading import is_file, is_folder

ASSUMED_BYTES = 4.0  # of UTF-8 text for a token: English under vocabularies of 32,000 to 150,000
SAMPLE = 256 * units.KIB  # bytes that are looked at
RECORDS = (".jsonl", ".ndjson")


class DataSize(NamedTuple):
    """About what the data holds."""

    tokens: float
    records: float  # rows where rows are not packed
    because: str


def estimate_data(data: str, tokenizer: str) -> DataSize | None:
    """About what the files of a path, folder or pattern hold; None where there are none.

    tokenizer: a folder, or anything else, which is left aside.
    """
    files = _find_files(data)
    if not files:
        return None
    own = Path(tokenizer).expanduser() / "tokenizer.json"
    vocabulary = str(own) if is_file(own) else ""
    return _estimate(tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files),
                     vocabulary)  # fmt: skip


def _find_files(data: str) -> list[Path]:
    path = Path(data).expanduser()
    if is_file(path):
        return [path]
    if is_folder(path):
        found = [p for p in path.rglob("*") if p.is_file()]
        hidden = [any(part.startswith(".") for part in p.relative_to(path).parts) for p in found]
        return sorted(p for p, left_out in zip(found, hidden, strict=True) if not left_out)
    names = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(data) else []
    return [Path(name) for name in names if is_file(Path(name))]


@lru_cache(maxsize=16)
def _estimate(files: tuple[tuple[str, int, int], ...], vocabulary: str) -> DataSize | None:
    text, records, sample = 0.0, 0.0, ""
    for name, size, _ in files:
        if name.endswith(".parquet"):
            found = _parquet(name)
            if found is None:
                return None
            text, records = text + found[0], records + found[1]
            continue
        with open(name, "rb") as file:
            start = file.read(SAMPLE)
        if not start or b"\0" in start:
            continue
        if not (layout := _find_layout(name, start)):
            continue  # one document, which `memfit train` passes over
        share, each, sampled = _look(start, layout)
        text += share * size
        records += size / each if each else 1
        sample = sample or sampled
    if not text:
        return None
    per_token, because = _bytes_a_token(sample, vocabulary)
    return DataSize(tokens=text / per_token, records=records, because=because)


def _find_layout(name: str, start: bytes) -> str:
    """`text`, records in an `array` or as `lines`; "" of a JSON document that holds none."""
    if name.endswith(".json"):
        return find_records(start.decode("utf-8", "ignore"))
    return "lines" if name.endswith(RECORDS) else "text"


def _look(start: bytes, layout: str) -> tuple[float, float, str]:
    """Share of a file's bytes that are text, bytes of a record, and the text itself."""
    if layout == "text":
        return 1.0, 0.0, start.decode("utf-8", "ignore")
    lines = _elements(start) if layout == "array" else start.splitlines()
    whole = lines[:-1] if len(lines) > 1 and len(start) == SAMPLE else lines
    texts: list[str] = []
    for line in whole:
        try:
            _collect(json.loads(line), texts)
        except (ValueError, RecursionError):
            continue
    read = sum(len(line) + 1 for line in whole)
    text = "\n".join(texts)
    size = len(text.encode("utf-8", "surrogatepass"))
    return size / max(read, 1), read / max(len(whole), 1), text


def _elements(start: bytes) -> list[bytes]:
    """Those of a JSON array that are whole."""
    text = io.StringIO(start.decode("utf-8", "ignore"))
    found: list[bytes] = []
    with suppress(ListError):
        found.extend(element.encode() for element in read_list(text.read))
    return found


def _collect(value: Any, texts: list[str]) -> None:
    """Every text in a record, at any depth; keys are not text."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for inner in value.values():
            _collect(inner, texts)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, texts)


def _parquet(name: str) -> tuple[float, float] | None:
    """Bytes of a file's columns before compression, and its rows; None without pyarrow."""
    try:
        from pyarrow import parquet
    except ImportError:
        return None
    try:
        footer = parquet.ParquetFile(name).metadata
    except (OSError, ValueError):
        return None
    groups = range(footer.num_row_groups)
    return float(sum(footer.row_group(g).total_byte_size for g in groups)), float(footer.num_rows)


def _bytes_a_token(sample: str, vocabulary: str) -> tuple[float, str]:
    assumed = f"{ASSUMED_BYTES:g} bytes a token (assumed)"
    if not vocabulary or not sample:
        return ASSUMED_BYTES, assumed
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return ASSUMED_BYTES, assumed
    count = len(Tokenizer.from_file(vocabulary).encode(sample, add_special_tokens=False).ids)
    found = len(sample.encode()) / max(count, 1)
    return found, f"{found:.2f} bytes a token, by the model's tokenizer on a sample"
