"""Trackers of experiments by accelerate's classes: tensorboard, wandb, mlflow, trackio and others.

Each gets the numbers of every line of the log, as it is written. A tracker that fails ends no run.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import install_extra, quiet_import

TEXTS = ("tensorboard", "wandb")  # whose classes in accelerate take texts beside numbers
PROJECT = "memfit"  # where a tracker wants a project's name beside the run's


class Trackers:
    """The trackers of a run, opened; used by its log."""

    def __init__(self, opened: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._opened = dict(opened)
        self._warn = warn

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand the numbers of a line on, and sampled answers to those that show texts; a tracker
        that fails is named and gets no more."""
        numbers = {k: v for k, v in row.items() if k != "step" and _is_number(v)}
        texts = _list_answers(row)
        for name, tracker in list(self._opened.items()):
            try:
                tracker.log(numbers | (texts if name in TEXTS else {}), step=row["step"])
            except Exception as error:  # whatever a service's client raises
                del self._opened[name]
                self._warn(f"`run.trackers: {name}` failed and gets nothing more: {error}")

    def close(self) -> None:
        """Let every tracker send what it holds."""
        for name, tracker in self._opened.items():
            try:
                tracker.finish()
            except Exception as error:
                self._warn(f"`run.trackers: {name}` could not be closed: {error}")


def _list_answers(row: Mapping[str, Any]) -> dict[str, str]:
    """Prompt and answer of each sample of a line."""
    return {
        f"sample_{number}": f"{sample['prompt']}\n---\n{sample['completion']}"
        for number, sample in enumerate(row.get("samples", ()), 1)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def open_trackers(
    names: Sequence[str], folder: Path, done: int, warn: Callable[[str], None]
) -> Trackers:
    """Open trackers for the run in `folder`, which goes on after step `done`.

    Raises InvalidRequest for a name that accelerate does not know, and where the tracker's own
    library is not installed or refuses to begin.
    """
    opened: dict[str, Any] = {}
    if not names:
        return Trackers(opened, warn)
    with quiet_import():
        tracking: Any = importlib.import_module("accelerate.tracking")
    # accelerate's own logger wants its state of all processes, which would join their group anew
    tracking.logger = logging.getLogger("accelerate.tracking")
    known = tracking.LOGGER_TYPE_TO_CLASS
    for name in names:
        if name not in known:
            raise InvalidRequest(
                f"`run.trackers: {name}` is no tracker that accelerate knows",
                hint=f"one of: {', '.join(sorted(known))}",
            )
        opened[name] = _open(name, known[name], folder, done)
    return Trackers(opened, warn)


def _open(name: str, kind: Any, folder: Path, done: int) -> Any:
    place: dict[str, Any] = {}
    if kind.requires_logging_directory:
        place["logging_dir"] = str(folder)
    if name == "tensorboard":  # later steps of a start that was killed are drawn no more
        place["purge_step"] = done + 1
    try:
        tracker = kind(name if name == "tensorboard" else PROJECT, **place)
        tracker.main_process_only = False  # the first rank alone opens any
        tracker.start()
    except ImportError:
        extra = name if name == "tensorboard" else ""
        raise InvalidRequest(
            f"`run.trackers: {name}`: its library is not installed",
            hint=install_extra(extra) if extra else f"pip install {name.replace('_', '-')}",
        ) from None
    except Exception as error:  # no key, no network, …: before the first step, so that it is seen
        raise InvalidRequest(
            f"`run.trackers: {name}` does not begin: {error}",
            hint="its own documentation says how it is set up, or leave it out",
        ) from None
    return tracker
