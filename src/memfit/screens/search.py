"""Screens of searches beyond one plan: offers side by side, a quantity solved for, why not."""

from __future__ import annotations

from memfit.core import units
from memfit.core.wording import VERDICTS, set_words
from memfit.plan.questions.compare import Comparison, Offered
from memfit.plan.questions.solve import Solved
from memfit.plan.questions.why_not import WhyNot
from memfit.screens.plan import show_ways_out
from memfit.screens.widgets.layout import (
    INDENT,
    bullets,
    heading,
    make_table,
    plain,
    say,
    show,
    tick,
)
from memfit.screens.widgets.terminal import Console

ANSWERS = {
    "refused": "it cannot be run",
    "slower": "it fits, and is slower",
    "faster": "it fits, and is faster",
    "equal": "nothing speaks against it",
}


def show_comparison(console: Console, found: Comparison) -> None:
    """A line an offer, the best first; below it each one's configuration and reason."""
    heading(console, f"Offers, {found.objective.replace('-', ' ')} first")
    numbers = ("needs", "a step", "all steps", "USD", "USD/Mtok")
    table = make_table("", "offer", "", *numbers, numbers=numbers)
    for row in found.rows:
        table.add_row(
            tick(console) if row.best else "",
            _name(row),
            VERDICTS.get(row.verdict, "REFUSED"),
            units.show_bytes(row.needs) if row.needs is not None else "",
            *_figures(row),
            style="bold" if row.best else "",
        )
    show(console, table)
    lines = []
    for row in found.rows:
        recipe = f"{row.framework}'s step, {row.recipe}: " if row.recipe else ""
        lines.append(f"{_name(row)}: {recipe}{row.because}")
    bullets(console, "Because", lines)


def _name(row: Offered) -> str:
    return row.offer.name


def _figures(row: Offered) -> tuple[str, ...]:
    if not row.recipe and row.step_seconds is None:
        return "", "", "", ""
    return (
        _known(row.step_seconds, units.show_seconds(row.step_seconds or 0)),
        _known(row.total_seconds, units.show_seconds(row.total_seconds or 0)),
        _known(row.usd, f"{row.usd or 0:,.0f}"),
        _known(row.usd_per_million_tokens, f"{row.usd_per_million_tokens or 0:.3g}"),
    )


def _known(value: float | None, shown: str) -> str:
    return "unknown" if value is None else shown


def show_solved(console: Console, found: Solved) -> None:
    """The answer, then every value that was planned for it."""
    name = found.field.replace("_", " ")
    if found.value is None:
        say(console, f"{name}: none", style="bold red")
    else:
        shown = f"{found.value:,}" if isinstance(found.value, int) else found.value
        say(console, f"{name}: {shown}", style="bold green")
    say(console, found.because, style="dim")
    heading(console, "Planned")
    table = make_table(name, "", "needs", "a step", "recipe", numbers=("needs", "a step"))
    for row in found.tried:
        table.add_row(
            plain(console, f"{row.value:,}" if isinstance(row.value, int) else row.value),
            VERDICTS.get(row.verdict, "REFUSED"),
            "" if row.needs is None else units.show_bytes(row.needs),
            "" if row.step_seconds is None else units.show_seconds(row.step_seconds),
            plain(console, row.because),
            style="bold" if row.value == found.value else "",
        )
    show(console, table)
    if found.least:
        show_ways_out(console, found.least, f" at {name} {found.tried[0].value}")


def show_why_not(console: Console, found: WhyNot) -> None:
    """What speaks against a configuration."""
    changes = " ".join(set_words(found.changes))
    word = ANSWERS.get(found.answer) or VERDICTS[found.answer]
    say(console, f"{changes}: {word}", style="bold")
    for line in found.because:
        say(console, f"- {line}", indent=INDENT)
    rows = [("asked for", found.requested), ("chosen", found.chosen)]
    heading(console, "Side by side")
    table = make_table("", "recipe", "needs", "a step", numbers=("needs", "a step"))
    for name, plan in rows:
        if plan is None:
            continue
        memory, seconds = plan.memory, plan.time.step_seconds
        needs = memory.needed
        table.add_row(
            name,
            plain(console, plan.label),
            "unknown" if needs is None else units.show_bytes(needs),
            "unknown" if seconds is None else units.show_seconds(seconds),
        )
    show(console, table)
