"""The folklore beside the ledger: what a rule says, what is so, and where the rule holds."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core import units
from memfit.core.wording import show_error
from memfit.plan.questions.rules import Rule
from memfit.screens.widgets.layout import INDENT, heading, make_table, plain, say, show
from memfit.screens.widgets.terminal import Console


def show_rules(console: Console, name: str, rows: Sequence[Rule], peak: str) -> None:
    """One table of figures, then each rule with its reason and its limits."""
    say(console, f"Rules of thumb for {name}", style="bold")
    numbers = ("rule gives", "memfit counts", "off by")
    heading(console, "Figures")
    table = make_table("rule", *numbers, numbers=numbers)
    for row in rows:
        counted = "depends on the batch" if row.exact is None else units.show_bytes(row.exact)
        table.add_row(
            plain(console, row.name), units.show_bytes(row.figure), counted, show_error(row.error)
        )
    show(console, table)
    say(console, peak, style="dim", indent=INDENT)
    for row in rows:
        heading(console, row.name)
        say(console, f"“{row.says}”", style="italic", indent=INDENT)
        say(console, f"counted: {row.because}", indent=INDENT)
        say(console, f"holds: {row.holds}", indent=INDENT)
        if row.measured:
            say(console, f"measured: {row.measured}", indent=INDENT)
