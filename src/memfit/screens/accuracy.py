"""Errors of the predictions over the corpus, by whatever the user groups them by."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.accuracy.memory_errors import Accuracy, Compared, Group
from memfit.core import units
from memfit.screens.widgets.layout import heading, make_table, plain, say, show
from memfit.screens.widgets.terminal import Console

ERRORS = ("median", "90 %", "worst", "bias")


def show_accuracy(console: Console, found: Accuracy, ways: Sequence[str], worst: int) -> None:
    """The whole screen of `memfit accuracy`."""
    head = found.headline
    rows = f"{len({c.id for c in found.compared})} rows predicted"
    say(console, f"{rows}, {sum(r.rows for r in found.refused)} not expressible", style="bold")
    if head:
        say(console, _sentence(head))
    if found.unspecified:
        note = (
            f"Apart: {found.unspecified.figures} figures whose source does not say what it"
            f" counted; held against reserved bytes, median {found.unspecified.median:.1%}."
        )
        say(console, note, style="dim")
    for way in ways:
        heading(console, f"By {way}")
        _show_groups(console, way, found.by(way))
    _show_capacities(console, found)
    _show_outcomes(console, found)
    _show_worst(console, found.compared, worst)
    _show_refused(console, found)


def _sentence(g: Group) -> str:
    return (
        f"{g.figures} figures of known kind and high or medium confidence: median error"
        f" {g.median:.1%}, 90 % within {g.p90:.1%}, worst {g.worst:.1%}, bias {g.bias:+.1%}."
    )


def _show_groups(console: Console, way: str, groups: Sequence[Group]) -> None:
    table = make_table(way, "n", *ERRORS, numbers=("n", *ERRORS))
    for g in groups:
        name = plain(console, g.name)
        table.add_row(
            name, str(g.figures), f"{g.median:.1%}", f"{g.p90:.1%}", f"{g.worst:.1%}",
            f"{g.bias:+.1%}",
        )  # fmt: skip
    show(console, table)


def _show_capacities(console: Console, found: Accuracy) -> None:
    if not found.capacities:
        return
    heading(console, "Verdicts on cards of every size")
    numbers = ("card", "n", "false fits", "at risk", "missed", "withheld")
    table = make_table(*numbers, numbers=numbers)
    for c in found.capacities:
        table.add_row(
            f"{c.gib} GiB", str(c.figures), str(c.false_fits), str(c.at_risk), str(c.missed),
            f"{c.withheld:.1%}",
        )  # fmt: skip
    show(console, table)
    note = (
        "false fits: said to fit, but measured above the card. missed: said not to fit, but"
        " measured below. withheld: median share of the card between the measured figure and what"
        " counts as full."
    )
    say(console, note, style="dim", indent=2)


def _show_outcomes(console: Console, found: Accuracy) -> None:
    if not found.outcomes:
        return
    right = sum(o.right for o in found.outcomes)
    false = sum(o.verdict == "fits" for o in found.outcomes)
    heading(console, "Runs that ran out of memory")
    say(
        console,
        f"{right} of {len(found.outcomes)} predicted to; {false} predicted to fit",
        indent=2,
    )
    wrong = [o for o in found.outcomes if not o.right]
    if wrong:
        table = make_table("row", "needs", "has", "verdict", numbers=("needs", "has"))
        for o in wrong:
            needs = "unknown" if o.predicted is None else units.show_gib(o.predicted)
            has = "unknown" if o.usable is None else units.show_gib(o.usable)
            table.add_row(plain(console, o.id), needs, has, o.verdict)
        show(console, table)


def _show_worst(console: Console, figures: Sequence[Compared], count: int) -> None:
    ordered = sorted((f for f in figures if f.headline), key=lambda f: -abs(f.error))[:count]
    if not ordered:
        return
    heading(console, f"The {len(ordered)} worst")
    numbers = ("predicted", "measured", "error")
    table = make_table("row", *numbers, numbers=numbers)
    for f in ordered:
        table.add_row(
            plain(console, f"{f.id} ({f.kind})"), units.show_gib(f.predicted),
            units.show_gib(round(f.measured)), f"{f.error:+.1%}",
        )  # fmt: skip
    show(console, table)


def _show_refused(console: Console, found: Accuracy) -> None:
    if not found.refused:
        return
    heading(console, "Not expressible")
    table = make_table("rows", "source", "why", numbers=("rows",))
    for r in sorted(found.refused, key=lambda r: -r.rows):
        table.add_row(str(r.rows), plain(console, r.source), plain(console, r.reason))
    show(console, table)
