"""The screen of `memfit doctor`, short enough to paste into a bug report."""

from __future__ import annotations

from memfit.screens.widgets.layout import bullets, heading, make_table, plain, show
from memfit.screens.widgets.terminal import Console
from memfit.workflows.doctor import Diagnosis


def show_doctor(console: Console, found: Diagnosis) -> None:
    """Versions, machine, accelerators, certificates, caches, and what will not work here."""
    for title, rows in (
        ("Versions", found.versions),
        ("Machine", found.system),
        ("Certificates", found.certificates),
        ("Caches", found.caches),
    ):
        if not rows:
            continue
        heading(console, title)
        table = make_table("", "")
        table.show_header = False
        for name, value in rows.items():
            table.add_row(plain(console, name), plain(console, value))
        show(console, table)
    bullets(console, "Accelerators", found.accelerators or ("none that torch sees",))
    bullets(console, "Notes", found.problems)
