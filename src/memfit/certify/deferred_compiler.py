"""torch's compiler is imported at its first use, which no traced step of one rank comes to.

torch and transformers mark functions for it and name it where constants come from, and so import
it, which takes half as long as a trace. What stands in its place knows these words; any other name
makes it the real package, so that nothing is ever missing. For a process of memfit's own alone.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
SOURCES = f"{COMPILER}.source"
ALONE = (f"{COMPILER}.config", f"{COMPILER}._trace_wrapped_higher_order_op")  # need no other part
TRACE = "torch.__trace"  # the compiler's structured log


def defer_compiler() -> None:
    """Import torch's compiler at the first use of more than its marks, settings and sources."""
    import torch
    from torch._guards import Source

    spec = None if COMPILER in sys.modules else importlib.util.find_spec(COMPILER)
    if spec is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Deferred
    sources: Any = ModuleType(SOURCES)
    sources.ConstantSource = type(
        "ConstantSource", (Source,), {"__init__": lambda self, name: None}
    )
    sources.RandomValueSource = type("RandomValueSource", (Source,), {})
    sys.modules[COMPILER], sys.modules[SOURCES] = package, sources
    torch._dynamo = package
    sys.meta_path.insert(0, _Finder(package))
    logging.getLogger(TRACE).handlers.clear()  # or describing a constant imports the compiler


def _ignore(*_: Any, **__: Any) -> None:
    """What only the compiler would do something with."""


def _leave(function: Any = None, *_: Any, **__: Any) -> Any:
    """A mark for the compiler, as a function or as a decorator with arguments."""
    return _leave if function is None else function


class _Deferred(ModuleType):
    """The compiler's package before it is executed."""

    allow_in_graph = assume_constant_result = disable = disallow_in_graph = staticmethod(_leave)

    graph_break = staticmethod(_ignore)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{COMPILER}.{name}" in ALONE:
            return import_module(f"{COMPILER}.{name}")
        _execute(self)
        return getattr(self, name)


def _execute(package: ModuleType) -> None:
    """Make it the real package."""
    spec = package.__spec__
    if isinstance(package, _Deferred) and spec is not None and spec.loader is not None:
        del sys.modules[SOURCES]
        object.__setattr__(package, "__class__", ModuleType)
        spec.loader.exec_module(package)


class _Finder(MetaPathFinder):
    """Executes the compiler's package before a part of it is imported that needs the others."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """The part that executing the package has imported; None where the usual finders find."""
        if not fullname.startswith(f"{COMPILER}.") or fullname in ALONE:
            return None
        _execute(self.package)
        module = sys.modules.get(fullname)
        if module is not None:  # the import system takes the spec that it has
            module.__spec__ = ModuleSpec(fullname, _Imported(module, module.__spec__))
        return None if module is None else module.__spec__


class _Imported(Loader):
    """Gives what is imported already, as it is: no module is executed twice."""

    def __init__(self, module: ModuleType, spec: ModuleSpec | None) -> None:
        self.module, self.spec = module, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        del spec
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore its own spec, and nothing else."""
        module.__spec__ = self.spec
