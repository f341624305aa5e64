"""An iteration of reinforcement learning by phase: seconds, their range, tokens a second."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core import units
from memfit.records.reinforcement.phase_time import PhaseTime
from memfit.screens.widgets.layout import heading, make_table, plain, show
from memfit.screens.widgets.terminal import Console


def show_phases(console: Console, phases: Sequence[PhaseTime]) -> None:
    """One line a phase, in an iteration's order; nothing where a step has none."""
    if not phases:
        return
    heading(console, "Phases of an iteration (predicted, every length at its bound)")
    columns = ("phase", "seconds", "from", "to", "tokens/s", "because")
    table = make_table(*columns, numbers=columns[1:-1])
    for row in phases:
        seconds = (row.seconds, row.seconds_low, row.seconds_high)
        rate = row.tokens_per_second
        table.add_row(
            row.phase, *map(_show, seconds), "" if rate is None else f"{rate:,.0f}",
            plain(console, row.because),
        )  # fmt: skip
    show(console, table)


def describe_longest(phases: Sequence[PhaseTime]) -> str:
    """The phase that takes longest, in words; "" where a step has none."""
    known = [(row.seconds, row) for row in phases if row.seconds is not None]
    if not known:
        return ""
    seconds, row = max(known, key=lambda found: found[0])
    rate = "" if row.tokens_per_second is None else f" at {row.tokens_per_second:,.0f} tokens/s"
    return f"most of it {row.phase}, {units.show_seconds(seconds)}{rate}"


def _show(seconds: float | None) -> str:
    return "unknown" if seconds is None else units.show_seconds(seconds)
