"""What other packages do with every line of a run's log, by the names of `run.callbacks`.

A package registers a function, `callbacks.register("name")(function)`, in a module that its entry
point of the group `memfit.extensions` names. It is called in the first rank's process after each
step, with the line of log.jsonl and the run's folder. One that fails is named and called no more:
it ends no run, and it can neither change nor stop one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.core.registry import Registry

Callback = Callable[[Mapping[str, Any], Path], None]

callbacks: Registry[Callback] = Registry("callback", "memfit.train.habits.callbacks")


class Callbacks:
    """The callbacks of a run; used by its log."""

    def __init__(self, names: Sequence[str], folder: Path, warn: Callable[[str], None]) -> None:
        """Raises UnknownName for one that no package registers."""
        self._open = {name: callbacks.find(name) for name in names}
        self._folder, self._warn = folder, warn

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand a line on."""
        for name, function in list(self._open.items()):
            try:
                function(dict(row), self._folder)
            except Exception as error:  # whatever another package raises
                del self._open[name]
                self._warn(f"`run.callbacks: {name}` failed and is called no more: {error!r}")
