"""log.jsonl: one JSON object a step, and no step twice however often a run was killed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memfit.core.errors import RunFailed
from memfit.records import write_atomically

NAME = "log.jsonl"
NUMBERS = ("loss", "learning_rate", "seconds", "tokens_per_second")  # of every step
OPTIONAL = (
    "grad_norm", "evaluation_loss", "loss_scale", "reward_accuracy", "reward_margin",
    "evaluation_reward_accuracy", "evaluation_reward_margin", "loss_unrounded", "loss_rounded",
    "communication_seconds", "exposed_communication_seconds",
)  # fmt: skip
OR_NULL = (  # of steps that sample answers: a number, or null where nobody knows
    "reward", "reward_std", "sampled_reward", "unjudged", "length", "longest", "truncated",
    "even_groups", "kl",
    "clipped_low", "clipped_high", "entropy", "rollout_seconds", "rollout_tokens_per_second",
    "reward_seconds", "score_seconds", "update_seconds", "update_tokens_per_second",
    "value_loss", "clipped_values",
)  # fmt: skip
MOST_HOLES = 5  # named of a log that has many


class Log:
    """The log of a run, open for the steps after `done`; later lines of a killed run are cut.

    digest: what the checkpoint of step `done` says of the log up to there; "" where it is silent.
    `damage` says what is no longer as it was written. Used as a context manager. Raises RunFailed
    when the file cannot be written.
    """

    def __init__(self, run: Path, done: int, *, digest: str = "") -> None:
        self._path = run / NAME
        rows = [row for row in read_log(run) if row["step"] <= done]
        content = b"".join(_line(row) for row in rows)
        self.damage = ""
        if holes := find_holes(rows, done):
            self.damage = f"`{self._path}` lacks steps {holes}: it was damaged"
        elif digest and hashlib.sha256(content).hexdigest() != digest:
            self.damage = f"`{self._path}` was changed after the checkpoint of step {done}"
        try:
            write_atomically(self._path, content)
            self._file = self._path.open("ab")
        except OSError as error:
            raise _failed(self._path, error) from None
        self._writes: list[Callable[[dict[str, Any]], None]] = []
        self._closes: list[Callable[[], None]] = []

    def follow(
        self, write: Callable[[dict[str, Any]], None], close: Callable[[], None] = lambda: None
    ) -> None:
        """Call `write` with every line from now on, and `close` at the end."""
        self._writes.append(write)
        self._closes.append(close)

    def write(self, row: dict[str, Any]) -> None:
        """Append one step; it is in the operating system's hands when this returns."""
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise _failed(self._path, error) from None
        for write in self._writes:
            write(row)

    def flush(self) -> None:
        """Make every line survive a power cut: called before a checkpoint that relies on them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(self._path, error) from None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        for close in self._closes:
            close()


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return every whole step of log.jsonl in order, without damaged lines, a last one that a crash
    cut short and repeated steps; `find_holes` names those that are missing."""
    try:
        lines = (run / NAME).read_bytes().split(b"\n")
    except OSError:
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        row = _read_row(line)
        if row is not None:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def digest_log(run: Path) -> str:
    """SHA-256 of the log as it stands; empty where there is none."""
    try:
        return hashlib.sha256((run / NAME).read_bytes()).hexdigest()
    except OSError:
        return ""


def find_holes(rows: Sequence[dict[str, Any]], done: int) -> str:
    """Return the steps up to `done` that a log misses, as "3, 5 to 9"; empty when it has all."""
    held = {row["step"] for row in rows}
    ranges: list[list[int]] = []
    for step in range(1, done + 1):
        if step in held:
            continue
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:MOST_HOLES]]
    return ", ".join(shown) + (" and more" if len(ranges) > MOST_HOLES else "")


def _read_row(line: bytes) -> dict[str, Any] | None:
    """One step as `Log.write` wrote it; None of anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _is_count(row.get("step")) or row["step"] < 1:
        return None
    unknown = ("loss",) if row.get("skipped") is True and row.get("loss") is None else ()
    numbers = [row.get(key) for key in NUMBERS if key not in unknown]
    whole = isinstance(row.get("watched"), bool) and _is_count(row.get("tokens"))
    optional = [row[key] for key in OPTIONAL if key in row]
    optional += [row[key] for key in OR_NULL if row.get(key) is not None]
    return row if whole and all(map(_is_number, [*numbers, *optional])) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _failed(path: Path, error: OSError) -> RunFailed:
    return RunFailed(
        f"could not write `{path}`: {error.strerror}",
        hint="free space there and start the same command again: it resumes",
    )
