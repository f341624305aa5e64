"""Named extensions: built-ins and plugins come through the same door.

An extension point is a package (`memfit.optimizers`, `memfit.families`, …); each of its modules
registers what it holds under a name. Plugins name a module under the entry point group
`memfit.extensions`; it is imported at the first look-up in any registry.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from memfit.core.errors import UnknownName

GROUP = "memfit.extensions"  # of entry points
INFO = (".dist-info", ".egg-info", ".egg")  # how the folders beside packages end

T = TypeVar("T")
_plugins_loaded = False


class Registry(Generic[T]):
    """Name -> extension, for one extension point.

    A name that equals a module of the package is imported alone, so that asking for one family
    does not pay for all of them; only listing imports every module.
    """

    def __init__(
        self, what: str, package: str, *, hint: Callable[[str], str] | None = None
    ) -> None:
        """hint: of a name that is unknown here, what it is called; "" leaves the nearest names."""
        self._hint = hint
        self.what = what
        self._package = package
        self._items: dict[str, T] = {}
        self._complete = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an object under `name`; a second one of that name is our bug."""

        def file(item: T) -> T:
            if self._items.get(name, item) is not item:
                raise ValueError(f"two extensions are registered as {self.what} `{name}`")
            self._items[name] = item
            return item

        return file

    def find(self, name: str) -> T:
        """The extension of that name; raises UnknownName with the nearest names."""
        if name not in self._items and name.isidentifier():
            module = f"{self._package}.{name}"
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
        if name not in self._items:
            self._load_all()
        if name not in self._items:
            known = f"known: {', '.join(self.names())}"
            unknown = UnknownName(self.what, name, self._items, see=known)
            unknown.hint = (self._hint and self._hint(name)) or unknown.hint
            raise unknown
        return self._items[name]

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        self._load_all()
        return sorted(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load_all(self) -> None:
        global _plugins_loaded
        if not self._complete:
            package = importlib.import_module(self._package)
            for info in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{info.name}")
            self._complete = True
        if not _plugins_loaded:
            _plugins_loaded = True
            if may_have_plugins(sys.path):
                from importlib.metadata import entry_points  # which a plan can do without

                for point in entry_points(group=GROUP):
                    point.load()


def may_have_plugins(folders: Iterable[str]) -> bool:
    """Whether a package that is installed in these folders names our group of entry points.

    Importing `importlib.metadata` takes longer than reading what it would read: the entry points
    beside each package. What is no folder (an archive) or cannot be read may have any.
    """
    for folder in folders:
        try:
            with os.scandir(folder or ".") as entries:
                found = [entry.path for entry in entries if entry.name.endswith(INFO)]
        except FileNotFoundError:
            continue  # `importlib.metadata` passes over it, too
        except OSError:
            return True
        for path in found:
            if path.endswith(".egg"):
                return True  # an archive, or a folder of several
            try:
                with open(f"{path}/entry_points.txt", "rb") as file:
                    if GROUP.encode() in file.read():
                        return True
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return True
    return False
