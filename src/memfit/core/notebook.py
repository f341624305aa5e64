"""Plans and certificates in a line, and as a notebook shows them: verdict, bar and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from memfit.core import units
from memfit.core.wording import COLOURS, VERDICTS

_TINTS = {"fits": "#009E73", "at_risk": "#B8860B", "does_not_fit": "#D55E00", "unproven": "#707070"}


def describe_bytes(needed: int | None, usable: int | None) -> str:
    """`needs 19.20 of 23.52 GiB`; what is unknown is left out."""
    if needed is None:
        return "memory unknown"
    if usable is None:
        return f"needs {units.show_gib(needed)}"
    return f"needs {needed / units.GIB:.2f} of {units.show_gib(usable)}"


def draw_result(
    verdict: str,
    subject: str,
    needed: int | None,
    usable: int | None,
    band: tuple[int | None, int | None],
    kinds: Mapping[str, int],
    tables: Sequence[tuple[str, Sequence[Sequence[str]]]],
) -> str:
    """HTML of a plan or a certificate: no script, no style sheet, nothing from elsewhere.

    kinds: bytes at the peak by kind; tables: each a heading and its rows.
    """
    low, high = band
    between = f" ({units.show_gib(low)} to {units.show_gib(high)})" if low and high else ""
    head = (
        f'<p><b style="color:{_TINTS.get(verdict, "#707070")}">{VERDICTS.get(verdict, verdict)}</b>'
        f" {escape(subject)}: {escape(describe_bytes(needed, usable))}{between}</p>"
    )
    parts = [head, _draw_bar(kinds, max(needed or 0, usable or 0), usable)] if needed else [head]
    rows = [(kind, units.show_bytes(n)) for kind, n in kinds.items()]
    parts += [_draw_table("Memory at the peak", rows, COLOURS)] if rows else []
    parts += [_draw_table(heading, rows, {}) for heading, rows in tables if rows]
    return f"<div>{''.join(parts)}</div>"


def draw_tables(tables: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """HTML of tables alone, each a heading and its rows."""
    return (
        f"<div>{''.join(_draw_table(heading, rows, {}) for heading, rows in tables if rows)}</div>"
    )


def _draw_bar(kinds: Mapping[str, int], whole: int, usable: int | None) -> str:
    pieces = "".join(
        f'<span title="{escape(kind)}: {units.show_bytes(n)}" style="display:inline-block;'
        f'height:16px;width:{100 * n / whole:.2f}%;background:{COLOURS.get(kind, "#999")}"></span>'
        for kind, n in kinds.items()
    )
    usable_text = "" if usable is None else f"<small>usable {units.show_gib(usable)}</small>"
    return (
        '<div style="max-width:640px;border:1px solid #999;line-height:0;white-space:nowrap;'
        f'overflow:hidden">{pieces}</div>{usable_text}'
    )


def _draw_table(heading: str, rows: Iterable[Sequence[str]], colours: Mapping[str, str]) -> str:
    lines = []
    for row in rows:
        colour = colours.get(row[0])
        swatch = f'<span style="color:{colour}">&#9632;</span> ' if colour else ""
        cells = "".join(
            f'<td style="text-align:left">{swatch if at == 0 else ""}{escape(cell)}</td>'
            for at, cell in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    caption = f'<caption style="text-align:left"><b>{escape(heading)}</b></caption>'
    return f"<table>{caption}{''.join(lines)}</table>"
