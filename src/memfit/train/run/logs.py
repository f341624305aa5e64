"""log.jsonl: one JSON object a step, and no step twice however often a run was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records import write_atomically

NAME = "log.jsonl"


class Log:
    """The log of a run, open for the steps after `done`; later lines of a killed run are cut.

    Used as a context manager. Raises RunFailed when the file cannot be written.
    """

    def __init__(self, run: Path, done: int, *, tensorboard: bool = False) -> None:
        self._path = run / NAME
        kept = [row for row in read_log(run) if row["step"] <= done]
        try:
            write_atomically(self._path, b"".join(_line(row) for row in kept))
            self._file = self._path.open("ab")
        except OSError as error:
            raise _failed(self._path, error) from None
        self._board = _open_board(run, done) if tensorboard else None

    def write(self, row: dict[str, Any]) -> None:
        """Append one step; it is in the operating system's hands when this returns."""
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise _failed(self._path, error) from None
        if self._board is not None:
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, row["step"])

    def flush(self) -> None:
        """Make every line survive a power cut: called before a checkpoint that relies on them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(self._path, error) from None

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(run: Path) -> list[dict[str, Any]]:
    """Every step of log.jsonl in order; a last line that a crash cut short is left out."""
    try:
        lines = (run / NAME).read_bytes().splitlines()
    except OSError:
        return []
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _failed(path: Path, error: OSError) -> RunFailed:
    return RunFailed(
        f"could not write `{path}`: {error.strerror}",
        hint="free space there and start the same command again: it resumes",
    )


def _open_board(run: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidRequest(
            "TensorBoard is not installed", hint="pip install 'memfit[tensorboard]'"
        ) from None
    return SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)
