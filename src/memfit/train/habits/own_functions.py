"""Functions of a user's own that a request names: `FILE.py:NAME`, or a name of a registry."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.registry import Registry


def find_function(spec: str, key: str, registry: Registry[Any]) -> Callable[..., Any]:
    """The function that `key` of a request names.

    Raises InvalidRequest: a file that is not there or cannot be run, or has no such function;
    UnknownName for a name that no package registers.
    """
    path, _, name = spec.rpartition(":")
    if not path:
        found: Callable[..., Any] = registry.find(spec)
        return found
    if not Path(path).is_file():
        raise InvalidRequest(
            f"`{key}: {spec}`: there is no file `{path}`",
            hint="the path is looked up from where memfit runs",
        )
    module = _load(Path(path).resolve(), f"`{key}: {spec}`")
    if not callable(function := getattr(module, name, None)):
        raise InvalidRequest(
            f"`{key}: {spec}`: `{path}` has no function `{name}`",
            hint=f"write `def {name}(…)` at the outermost level of the file",
        )
    return function  # type: ignore[no-any-return]


def _load(file: Path, place: str) -> object:
    """Run a file as a module of its own; its folder is on Python's path, as with `python FILE`."""
    found = importlib.util.spec_from_file_location(f"memfit_own_{file.stem}", file)
    if found is None or found.loader is None:
        raise InvalidRequest(f"{place}: `{file}` is no Python file", hint="name a file in `.py`")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever a user's own code raises
        raise InvalidRequest(
            f"{place}: `{file}` cannot be run: {error!r}", hint=f"see `python {file}`"
        ) from None
    return module
