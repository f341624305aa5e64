"""From a query string to a request: keys and values are those of `--set`, `model` is the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import msgspec

from memfit import api
from memfit.cli.options import read_value
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import shorten
from memfit.records.habits.mixture import list_paths
from memfit.records.request import Request

Pairs = tuple[tuple[str, str], ...]
LONGEST_NAME = 500  # characters; paths of folders included
FILES = (".yaml", ".yml", ".json")


def read_query(pairs: Pairs) -> Request:
    """The request that `memfit plan MODEL --set KEY=VALUE …` reads.

    Raises InvalidRequest and UnknownName with the command line's own text; and where `model` names
    a file outside the folder in which the server was started.
    """
    return read_model(pairs, read_changes(pairs))


def read_changes(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """All keys but `model`; an empty value leaves a key as it is."""
    with _shallow():
        keys = {key: read_value(key, text) for key, text in pairs if key != "model" and text != ""}
    for key in ("task.data", "task.evaluation"):
        named = keys.get(key)
        for name in named if isinstance(named, list) else [named]:
            for path in list_paths(name) if isinstance(name, str) else ():
                _check_below(path)
    task = keys.get("task")
    if isinstance(task, dict) and {"data", "evaluation"} & task.keys():
        raise InvalidRequest(
            "`task` names files", hint="set `task.data` by its own key, below the folder"
        )
    return keys


def read_model(pairs: Pairs, changes: dict[str, Any]) -> Request:
    """The request of the model named, or of the config.json that stands there instead."""
    model = dict(pairs).get("model", "").strip()
    if not model:
        raise InvalidRequest(
            "no model was named", hint="choose one of the catalogue, or paste its config.json"
        )
    if not model.startswith("{"):
        _check_place(model)
        return api.read(model, changes=changes)
    data: dict[str, Any] = {"model": _read_config(model)}
    with _shallow():
        for key, value in changes.items():
            api.put(data, key, value)
        return api.read_data(data)


def _read_config(text: str) -> dict[str, Any]:
    try:
        with _shallow():
            config = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"the pasted config.json is not JSON: {error}",
            hint="paste the whole file, from `{` to `}`",
        ) from None
    return dict(config)


@contextmanager
def _shallow() -> Iterator[None]:
    """Raise InvalidRequest where what is read is nested too deeply to be read."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest(
            "what was sent is nested too deeply", hint="a config.json has a few levels"
        ) from None


def _check_below(name: str) -> None:
    """A file or folder that a page names is below the one in which the server was started."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or name.startswith("~") or "\0" in name:
        raise InvalidRequest(
            f"`{shorten(name)}` is not below the folder in which `memfit ui` was started",
            hint="start it there, or paste the model's config.json",
        )


def _check_place(model: str) -> None:
    """A folder may be named where the server was started, and below; a request's file may not."""
    if len(model) > LONGEST_NAME:
        raise InvalidRequest(
            f"the model's name has {len(model):,} characters, and {LONGEST_NAME} are the most",
            hint="choose one of the catalogue, or paste its config.json",
        )
    _check_below(model)
    path = PurePath(model)
    if path.suffix in FILES:
        raise InvalidRequest(
            f"`{model}` is a file, and the page takes a model",
            hint=f"`memfit plan {model}` reads it; the page takes a name, a folder or a config",
        )
