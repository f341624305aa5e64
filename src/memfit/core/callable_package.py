"""Packages that are verbs, too: `memfit.plan("gpt2")` plans, and `memfit.plan.search` is a module.

Importing `memfit.plan.search` makes `memfit.plan` the package, so that a function of that name in
`memfit` would be there until somebody imports it. The package itself is therefore what is called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

VERBS = "memfit.workflows.python_verbs"


class VerbPackage(ModuleType):
    """A package that is called as the verb of its name."""

    def __call__(self, *arguments: Any, **words: Any) -> Any:
        """What the verb returns; see `memfit.workflows.python_verbs`."""
        return getattr(import_module(VERBS), self.__name__.rpartition(".")[2])(*arguments, **words)


def make_callable(package: str) -> None:
    """Let a package that is being imported be called as a verb."""
    sys.modules[package].__class__ = VerbPackage
