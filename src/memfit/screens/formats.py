"""One number in every format: its parts, its range, what is stored and how far off that is."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.number_formats import FormatRow
from memfit.screens.widgets.layout import heading, make_table, plain, say, show
from memfit.screens.widgets.terminal import Console


def show_formats(console: Console, x: float, rows: Sequence[FormatRow]) -> None:
    """Two tables: what each format is, and what becomes of x in it."""
    say(console, f"{x!r} in {len(rows)} formats", style="bold")
    heading(console, "Stored")
    numbers = ("step at x", "error", "relative")
    table = make_table("format", "stored", *numbers, numbers=numbers)
    for row in rows:
        table.add_row(
            row.name,
            row.shown,
            "-" if row.step is None else f"{row.step:.3g}",
            "exact" if row.absolute_error == 0 else f"{row.absolute_error:.3g}",
            _relative(row.relative_error),
        )
    show(console, table)
    heading(console, "Formats")
    parts = ("bits", "sign", "exp", "mant", "largest", "least normal")
    table = make_table("format", *parts, "note", numbers=parts)
    for row in rows:
        table.add_row(
            row.name,
            *(str(n) for n in (row.bits, row.sign, row.exponent, row.mantissa)),
            f"{row.maximum:.4g}",
            "-" if row.smallest_normal is None else f"{row.smallest_normal:.3g}",
            plain(console, row.note),
        )
    show(console, table)
    heading(console, "Bits (sign exponent mantissa)")
    table = make_table("", "")
    table.show_header = False
    for row in rows:
        if row.encoding:
            table.add_row(row.name, row.encoding)
    show(console, table)


def _relative(error: float) -> str:
    if error == 0:
        return "0"
    return f"{error:.2%}" if error >= 1e-4 else f"{error:.1e}"
