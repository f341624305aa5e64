"""transformers' list of what its models export, made when a name is needed that is not known.

transformers reads the files of all its models, some four hundred folders, to answer for any name,
which takes half as long as a trace. Here it reads those folders whose names every process asks for;
all others are read at the first name that these do not have. For a process of memfit's own alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

LISTING = "transformers.utils.import_utils"
LISTED = {"transformers": "models", "transformers.models": None}  # package -> prefix of its names
LOOKED_UP = ("auto", "bloom")  # folders whose names transformers and peft look up


def defer_lists() -> None:
    """For a process that has not imported transformers yet; else nothing is changed."""
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module that lists, which is changed when it has been executed."""

    def find_spec(self, fullname: str, path: Any, target: object = None) -> ModuleSpec | None:
        """None for all other modules: the usual finders find them."""
        if fullname != LISTING:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """As ever, and then the lists are deferred."""
        super().exec_module(module)
        _defer(module)


def _defer(utils: Any) -> None:
    """Lists of models are short, and lengthened by names that are not in them."""
    whole, find = utils.define_import_structure, utils._LazyModule.__getattr__

    def define(module_path: str, prefix: str | None = None) -> Any:
        folder = _folder(module_path)
        if folder.name != "models":
            return whole(module_path, prefix)
        few = {
            name: utils.create_import_structure_from_path(str(folder / name)) for name in LOOKED_UP
        }
        dots = "" if prefix is None else f"{prefix}."
        found: dict[frozenset[str], dict[str, Any]] = {frozenset(): {}}
        for backends, modules in utils.spread_import_structure(few).items():
            found[backends] = {dots + name: exported for name, exported in modules.items()}
        return found

    def find_or_list(package: Any, name: str) -> Any:
        try:
            return find(package, name)
        except AttributeError:
            if package.__name__ not in missing or name.startswith("_"):
                raise
        folder = Path(package.__file__).parent
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            return import_module(f"{package.__name__}.{name}")
        missing.remove(package.__name__)
        prefix = LISTED[package.__name__]
        models = folder / "models" if prefix else folder
        _lengthen(package, utils._LazyModule("", "", whole(models, prefix)))
        return find(package, name)

    missing = set(LISTED)
    utils.define_import_structure, utils._LazyModule.__getattr__ = define, find_or_list


def _folder(path: str) -> Path:
    place = Path(path)
    return place.parent if place.is_file() else place


def _lengthen(package: Any, whole: Any) -> None:
    """Give a package all that another one of the same files lists."""
    package._modules |= whole._modules
    package.__all__ = [*dict.fromkeys([*package.__all__, *whole.__all__])]
    for table in ("_class_to_module", "_object_missing_backend", "_import_structure"):
        setattr(package, table, {**getattr(whole, table), **getattr(package, table)})
