"""Formats of data files that other packages read: a function of a path for each suffix.

A package registers a reader under the suffix of its files, `formats.register("xml")(read)`, in a
module that its entry point of the group `memfit.extensions` names. The records of a reader are as
lines of JSONL: `text`, `prompt` and `completion`, `messages`, `chosen` and `rejected`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.registry import Registry

Reader = Callable[[Path], Iterator[Mapping[str, Any]]]
PLUGIN = "plugin"  # how the kind of such a file begins

formats: Registry[Reader] = Registry("format of data", "memfit.train.data.formats")


def name_kind_of(path: Path) -> str:
    """The kind of a file that a registered reader reads, "" where none does.

    It has the digest of the reader's code: tokens of other code are no tokens of this one.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if not suffix or suffix not in formats.names():
        return ""
    file = inspect.getsourcefile(formats.find(suffix))
    code = Path(file).read_bytes() if file else b""
    return f"{PLUGIN}-{suffix}-{hashlib.sha256(code).hexdigest()[:16]}"


def read_lines(path: Path) -> Iterator[bytes]:
    """Each record of a file as a line of JSON; InvalidRequest, naming the record, where none can be
    made of it."""
    suffix, done = path.suffix.lower().removeprefix("."), 0
    try:
        for record in formats.find(suffix)(path):
            yield json.dumps(dict(record)).encode() + b"\n"
            done += 1
    except (TypeError, ValueError, OSError) as error:
        raise InvalidRequest(
            f"the reader of `.{suffix}` files failed on `{path}` after {done} records: {error}",
            hint="it is of another package, registered with memfit as a format of data; its records"
            " are objects of texts, as lines of JSONL are",
        ) from None
