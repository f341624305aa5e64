"""Errors of predicted step times over the corpus."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.accuracy.time_errors import NEAR, TimeAccuracy, TimeGroup
from memfit.core import units
from memfit.screens.widgets.layout import heading, make_table, plain, say, show
from memfit.screens.widgets.terminal import Console

ERRORS = ("median", "90 %", "worst", "bias")


def show_times(console: Console, found: TimeAccuracy, ways: Sequence[str], worst: int) -> None:
    """The whole screen of `memfit accuracy --what time`."""
    refused = sum(r.rows for r in found.refused)
    say(console, f"{len(found.compared)} steps predicted, {refused} not expressible", style="bold")
    if found.headline:
        say(console, _sentence(found.headline))
    if found.test:
        say(console, f"Rows that no constant was fitted on: {_sentence(found.test)}")
    if found.tau is not None:
        line = f"Order inside {len(found.sweeps)} sweeps: Kendall's tau {found.tau:.2f} (median)."
        say(console, line)
    if found.near is not None:
        near = sum(c.near for c in found.choices)
        line = (
            f"Of {len(found.choices)} jobs of which several layouts were published, the one that is"
            f" predicted to be the fastest is within {NEAR:.0%} of the fastest in {near}."
        )
        say(console, line)
    for way in ways:
        heading(console, f"By {way}")
        _show_groups(console, way, found.by(way))
    _show_worst(console, found, worst)
    if found.refused:
        heading(console, "Not expressible")
        table = make_table("rows", "source", "why", numbers=("rows",))
        for r in sorted(found.refused, key=lambda r: -r.rows):
            table.add_row(str(r.rows), plain(console, r.source), plain(console, r.reason))
        show(console, table)


def _sentence(g: TimeGroup) -> str:
    return (
        f"{g.rows} steps of {g.sources} sources, one weight each: median error {g.median:.1%},"
        f" 90 % within {g.p90:.1%}, worst {g.worst:.1%}, bias {g.bias:+.1%}."
    )


def _show_groups(console: Console, way: str, groups: Sequence[TimeGroup]) -> None:
    table = make_table(way, "n", *ERRORS, numbers=("n", *ERRORS))
    for g in groups:
        table.add_row(
            plain(console, g.name), str(g.rows), f"{g.median:.1%}", f"{g.p90:.1%}",
            f"{g.worst:.1%}", f"{g.bias:+.1%}",
        )  # fmt: skip
    show(console, table)


def _show_worst(console: Console, found: TimeAccuracy, count: int) -> None:
    ordered = sorted(found.compared, key=lambda f: -abs(f.error))[:count]
    if not ordered:
        return
    heading(console, f"The {len(ordered)} worst")
    numbers = ("predicted", "measured", "error")
    table = make_table("row", *numbers, numbers=numbers)
    for f in ordered:
        table.add_row(
            plain(console, f.id), units.show_seconds(f.predicted), units.show_seconds(f.measured),
            f"{f.error:+.1%}",
        )  # fmt: skip
    show(console, table)
