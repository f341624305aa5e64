"""Run folders below one folder: what each predicted and measured, and a run as it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.core.errors import Error, InvalidRequest
from memfit.core.system.reading import shorten
from memfit.records import Record
from memfit.records.results import Report
from memfit.report.join import read_report

MOST = 200  # run folders listed, the newest first


class RunRow(Record, frozen=True, kw_only=True):
    """One run folder; None is unknown, or not done yet."""

    name: str  # below the folder of runs
    title: str
    recipe_digest: str
    verdict: str
    steps: int  # asked for
    steps_done: int
    finished: bool
    ended_early: str  # why, where it ended before its last step; "" where it did not
    predicted: float | None  # peak_allocated, bytes
    certified: float | None
    measured: float | None
    usable: int | None
    predicted_rate: float | None  # tokens a second
    measured_rate: float | None
    loss: float | None  # of the last step
    because: str = ""  # why the folder cannot be read


class RunView(Record, frozen=True, kw_only=True):
    """A run and its log, of which only the steps that were not seen yet."""

    name: str
    report: Report
    log: tuple[dict[str, Any], ...]


def list_runs(root: Path) -> tuple[RunRow, ...]:
    """Folders with a plan.json, two levels deep; the newest first."""
    found = [p.parent for pattern in ("*", "*/*") for p in root.glob(f"{pattern}/plan.json")]
    newest = sorted(found, key=lambda folder: -(folder / "plan.json").stat().st_mtime)
    return tuple(_row(root, folder) for folder in newest[:MOST])


def _row(root: Path, folder: Path) -> RunRow:
    name = folder.relative_to(root).as_posix()
    try:
        report = read_report(folder)
    except Error as error:
        return RunRow(
            name=name, title=name, recipe_digest="", verdict="unproven", steps=0, steps_done=0,
            finished=False, ended_early="", predicted=None, certified=None, measured=None,
            usable=None, predicted_rate=None, measured_rate=None, loss=None, because=error.message,
        )  # fmt: skip
    run = report.run
    figures = {c.name: c for c in report.comparisons}
    peak, rate = (figures.get(n) for n in ("memory.peak_allocated", "time.tokens_per_second"))
    memory = (report.certificate or report.plan).memory
    return RunRow(
        name=name,
        title=report.title,
        recipe_digest=report.recipe_digest,
        verdict=memory.verdict,
        steps=report.plan.recipe.steps,
        steps_done=run.steps_done if run else 0,
        finished=bool(run and run.finished),
        ended_early=run.ended_early if run else "",
        predicted=peak.predicted if peak else None,
        certified=peak.certified if peak else None,
        measured=peak.measured if peak else None,
        usable=memory.usable,
        predicted_rate=rate.predicted if rate else None,
        measured_rate=rate.measured if rate else None,
        loss=run.losses[-1][1] if run and run.losses else None,
    )


def read_run(root: Path, name: str, after: int = 0) -> RunView:
    """A run's report, and its log's steps above `after`.

    Raises InvalidRequest for what is no run folder below `root`, wherever a link may lead.
    """
    from memfit.train.run.logs import read_log

    top = root.resolve()
    try:
        folder = (top / name).resolve()
    except (OSError, ValueError):
        folder = top
    if folder == top or not folder.is_relative_to(top):
        raise InvalidRequest(
            f"`{shorten(name)}` is no run below `{root}`", hint="choose one of the list"
        )
    rows = [row for row in read_log(folder) if row["step"] > after]
    return RunView(name=name, report=read_report(folder), log=tuple(rows))
