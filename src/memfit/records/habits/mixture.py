"""`task.data` that names several data sets with weights: `data/code=0.7, data/chat.jsonl=0.3`."""

from __future__ import annotations

import re
from typing import NamedTuple

from memfit.core.errors import InvalidRequest

PART = re.compile(r"\s*(?P<path>[^,]+?)\s*=\s*(?P<weight>[0-9]+(\.[0-9]*)?|\.[0-9]+)\s*")


class Part(NamedTuple):
    """One data set of several."""

    path: str
    share: float  # of the rows; all parts have 1 together


def read_mixture(data: str) -> tuple[Part, ...]:
    """The data sets that a text names with their shares; () for a plain path.

    Raises InvalidRequest for a weight of 0 and for a data set that is named twice.
    """
    found = [PART.fullmatch(text) for text in data.split(",")]
    if len(found) < 2 or not all(found):
        return ()
    weights: dict[str, float] = {}
    for match in found:
        assert match is not None
        path, weight = match["path"], float(match["weight"])
        if path in weights:
            raise InvalidRequest(
                f"`task.data: {data}` names `{path}` with weights {weights[path]:g} and {weight:g}",
                hint="name each data set once",
            )
        if not weight:
            raise InvalidRequest(
                f"`task.data: {data}` gives `{path}` the weight 0", hint="leave it out instead"
            )
        weights[path] = weight
    total = sum(weights.values())
    return tuple(Part(path, weight / total) for path, weight in weights.items())


def list_paths(data: str) -> tuple[str, ...]:
    """Every path that `task.data` or `task.evaluation` names."""
    return tuple(part.path for part in read_mixture(data)) or (data,)
