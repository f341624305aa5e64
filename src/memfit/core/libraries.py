"""The libraries a step runs on: their versions, and importing those that talk meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# torchao, which peft imports where it is installed, warns of each kernel that this build of torch
# cannot load, and torch's pytree of how torchao registers its enums, bitsandbytes of a package
# of kernels that it would rather have: nothing a user could act on.
TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes")

CUDNN = re.compile(r"nvidia_cudnn_cu1[23]-(\d+)\.(\d+)\.(\d+).*\.dist-info$")
SCANNER = "create_import_structure_from_path"  # transformers': what each folder of models exports


@contextmanager
def quiet_import() -> Iterator[None]:
    """Their warnings are left out while the block imports; errors are still shown."""
    import logging  # a plan imports this module and needs none

    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Hidden:
    """An import finder, first in `sys.meta_path`, that reports some packages as not installed."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for a package that is hidden; None leaves others to other finders."""
        del path, target
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"`{name}` is hidden", name=name)


@contextmanager
def hidden_packages(names: Iterable[str]) -> Iterator[None]:
    """Meanwhile these packages are as if they were not installed, but for those that are imported.

    Libraries that import whatever is installed then do not, and remember that it is missing: for a
    process of memfit's own alone.
    """
    import importlib.util
    import sys

    finder, real = _Hidden(frozenset(names)), importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in finder.names else real(name, package)

    finders: list[Any] = sys.meta_path
    finders.insert(0, finder)
    importlib.util.find_spec = find_spec
    try:
        yield
    finally:
        finders.remove(finder)
        importlib.util.find_spec = real


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch garbage collection off inside, and freeze what the block leaves.

    Imported modules stay alive: collections that walk them take a quarter of the imports' time.
    Use it only in a process of memfit's own.
    """
    import gc

    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def scan_models_once() -> None:
    """Import transformers so that it reads the folders of its models once, where it does so twice.

    It does so for `transformers` and then for `transformers.models`, whose file it gets in
    place of the folder. A transformers that has no such function is left as it is.
    """
    from pathlib import Path

    with quiet_import():
        from transformers.utils import import_utils
    plain = getattr(import_utils, SCANNER, None)
    if plain is None:
        return

    def scan(path: Any) -> Any:
        place = Path(path)
        return plain(place.parent if place.is_file() else place)

    setattr(import_utils, SCANNER, scan)


def install_extra(extra: str) -> str:
    """What to type for an extra of memfit's: from the folder or the wheel that it came from.

    pip notes where a package was installed from (PEP 610), unless that is an index.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        noted = json.loads(distribution("memfit").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        noted = {}
    url = str(noted.get("url", ""))
    if noted.get("dir_info", {}).get("editable"):
        return f"pip install -e '{url.removeprefix('file://')}[{extra}]'"
    return f"pip install 'memfit[{extra}]{f' @ {url}' if url else ''}'"


@lru_cache(maxsize=1)
def read_cudnn() -> tuple[int, int, int] | None:
    """The version of the cuDNN that pip installed beside torch; None where there is none.

    The name of what pip leaves of a package says it without an import of torch, or of
    `importlib.metadata`, which takes longer than all else that a plan imports of Python's own.
    """
    import os
    import sys

    for folder in sys.path:
        with suppress(OSError):
            for found in map(CUDNN.match, sorted(os.listdir(folder or "."), reverse=True)):
                if found:
                    major, minor, patch = map(int, found.groups())
                    return major, minor, patch
    return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each library here, memfit among them; `not installed` where it is not."""
    from importlib.metadata import PackageNotFoundError, version

    from memfit import __version__

    found = {}
    for name in names:
        try:
            found[name] = __version__ if name == "memfit" else version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
