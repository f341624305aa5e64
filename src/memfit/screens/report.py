"""The joined report in a terminal: three sources side by side, the curve, the sample."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.wording import short_name, show_error, show_value
from memfit.records.results import Comparison, Report, Run
from memfit.report.join import SECONDS, phase_seconds, sections, warnings_of
from memfit.screens.widgets.chart import draw_curve
from memfit.screens.widgets.layout import (
    INDENT,
    bullets,
    heading,
    make_table,
    next_commands,
    plain,
    say,
    show,
)
from memfit.screens.widgets.memory import show_bar, show_verdict
from memfit.screens.widgets.terminal import Console

ENOUGH = 4  # points that are worth a curve


def show_report(console: Console, report: Report, *, commands: Sequence[str]) -> None:
    """The whole screen of `memfit report` and the end of `memfit train`."""
    source = report.certificate or report.plan
    show_verdict(console, source.memory, report.title)
    say(
        console,
        f"recipe {report.recipe_digest}; "
        + ("certified" if report.certificate else "not certified")
        + "; "
        + _progress(report.run, report.plan.recipe.steps),
        style="dim",
    )
    show_bar(console, source.memory)
    for title, rows in sections(report.comparisons):
        _show_rows(console, title, rows)
    bullets(console, "Mind", warnings_of(report))
    if report.run is not None:
        _show_rewards(console, report.run)
        _show_losses(console, report.run)
        _show_environment(console, report.run)
    if report.sample:
        heading(console, "Sample")
        for line in report.sample.splitlines():
            say(console, line, indent=INDENT)
    next_commands(console, commands)


def _progress(run: Run | None, steps: int) -> str:
    if run is None:
        return "not trained"
    if not run.losses:
        return f"{run.steps_done:,} steps measured"
    return f"{run.steps_done:,} of {steps or run.steps_done:,} steps ({run.state})"


def _show_rows(console: Console, title: str, rows: Sequence[Comparison]) -> None:
    heading(console, title)
    numbers = ("predicted", "certified", "measured", "err. pred.", "err. cert.")
    table = make_table("", *numbers, numbers=numbers)
    for row in rows:
        values = (row.predicted, row.certified, row.measured)
        table.add_row(
            short_name(row.name),
            *(show_value(v, row.unit) for v in values),
            show_error(row.error_predicted),
            show_error(row.error_certified),
        )
    show(console, table)


def _show_losses(console: Console, run: Run) -> None:
    training = () if run.rewards else run.losses  # a policy's loss says nothing of its progress
    _show_curve(console, "Training loss", training)
    _show_curve(console, "Evaluation loss", run.evaluations)


def _show_curve(console: Console, title: str, points: Sequence[tuple[int, float]]) -> None:
    if not points:
        return
    heading(console, f"{title}: {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    if len(points) < ENOUGH:
        return
    width = console.width - 2 * INDENT
    for line in draw_curve(points, width=width, ascii_only=console.ascii_only):
        say(console, line, indent=INDENT)


def _show_rewards(console: Console, run: Run) -> None:
    """The curve of rewards, seconds of each part of an iteration, and answers."""
    _show_curve(console, "Reward", run.rewards)
    _show_curve(console, "KL divergence from the reference, nats a token", run.divergences)
    _show_curve(console, "Loss of the values", run.value_losses)
    parts = phase_seconds(run)
    if parts:
        heading(console, "Seconds of an iteration")
        table = make_table("", "median", "share", numbers=("median", "share"))
        whole = sum(m.value for m in parts.values())
        for name, m in parts.items():
            share = f"{m.value / whole:.0%}" if whole else ""
            table.add_row(name, show_value(m.value, m.unit), share)
        show(console, table)
    if run.answers:
        heading(console, "Sampled answers")
        for answer in run.answers:
            reward = ", no reward" if answer.reward is None else f", reward {answer.reward:.3g}"
            shown = reward if run.rewards else ""  # of a run that is not rewarded, none is missing
            say(console, f"step {answer.step}{shown}", style="dim", indent=INDENT)
            say(console, f"{answer.prompt!r} -> {answer.completion!r}", indent=2 * INDENT)


def _show_environment(console: Console, run: Run) -> None:
    other = {
        name: m
        for name, m in run.measurements.items()
        if not name.startswith(("memory.peak", "memory.device", "time.", SECONDS))
    }
    if other:
        heading(console, "Also measured")
        table = make_table("", "value", "counter", numbers=("value",))
        for name, m in other.items():
            table.add_row(name, show_value(m.value, m.unit), plain(console, m.counter))
        show(console, table)
    if run.environment:
        line = ", ".join(f"{k} {v}" for k, v in run.environment.items())
        heading(console, "Environment")
        say(console, line, style="dim", indent=INDENT)
