"""What a user's own functions do with every line of a run's log: those of `run.callbacks`.

A package registers a function, `callbacks.register("name")(function)`, in a module that its entry
point of the group `memfit.extensions` names; or a request names `FILE.py:NAME`. It is called in
the first rank's process after each step, with the line of log.jsonl and the run's folder. One that
returns `Stop("why")` ends the run after this step, which is then finished early. One that fails is
named and called no more: it ends no run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.registry import Registry
from memfit.train.habits.own_functions import find_function


class Stop(NamedTuple):
    """What a callback returns to end the run after the step that it was called with."""

    reason: str = ""  # for the report and run.json


Callback = Callable[[Mapping[str, Any], Path], Stop | None]

callbacks: Registry[Callback] = Registry("callback", "memfit.train.habits.callbacks")


class Callbacks:
    """The callbacks of a run; used by its log."""

    def __init__(self, names: Sequence[str], folder: Path, warn: Callable[[str], None]) -> None:
        """Raises InvalidRequest or UnknownName for one that there is not."""
        self._open = {name: find_function(name, "run.callbacks", callbacks) for name in names}
        self._folder, self._warn = folder, warn
        self.stop = ""  # who ends the run, and why

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand a line on."""
        for name, function in list(self._open.items()):
            try:
                answer = function(dict(row), self._folder)
            except Exception as error:  # whatever another package raises
                del self._open[name]
                self._warn(f"`run.callbacks: {name}` failed and is called no more: {error!r}")
                continue
            if isinstance(answer, Stop) and not self.stop:
                why = f": {answer.reason}" if answer.reason else ""
                self.stop = f"`run.callbacks: {name}` ended the run after step {row['step']}{why}"
