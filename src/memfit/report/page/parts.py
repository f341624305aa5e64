"""Pieces of HTML: every text is escaped here, and nothing points outside the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite

from memfit.core import units
from memfit.core.wording import COLOURS, INKS, PHASES

ENOUGH_FOR_A_LABEL = 0.12  # of the bar's width
Points = Sequence[tuple[int, float]]


def text(value: object) -> str:
    """The value as HTML text or attribute value."""
    return escape(str(value), quote=True)


def dotted(value: object) -> str:
    """A dotted name or a path, which may go on in the next line behind a dot or a stroke."""
    return text(value).replace(".", ".<wbr>").replace("/", "/<wbr>").replace("_", "_<wbr>")


def section(title: str, *pieces: str) -> str:
    """A titled card; nothing when it has no content."""
    body = "".join(pieces)
    if not body:
        return ""
    return f'<section id="{anchor(title)}"><h2>{text(title)}</h2>{body}</section>\n'


def anchor(title: str) -> str:
    """The id of the section of that title."""
    return "-".join(re.findall(r"[a-z]+", title.lower()))


def contents(sections: str) -> str:
    """Links to every section of a page, in their order."""
    found = re.findall(r'<section id="([a-z-]+)"><h2>(.*?)</h2>', sections)
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in found)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, numbers: int = 0
) -> str:
    """Cells are HTML already; the last `numbers` columns are set right.

    A narrow window scrolls it sideways, for which the keyboard must reach it: hence its name.
    """
    first = len(heads) - numbers

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i >= first else ''}>{cell}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = "".join(f"<tr>{cells('th', [text(h) for h in heads])}</tr>") if any(heads) else ""
    if not body:
        return ""
    return (
        f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0">'
        f"<table><thead>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def pairs(rows: Mapping[str, object], *, label: str) -> str:
    """A table of names and values."""
    cells = [(dotted(k), f"<span class=mono>{text(v)}</span>") for k, v in rows.items()]
    return table(("", ""), cells, label=label)


def key(kind: str) -> str:
    """The colour of a kind beside its name."""
    return f'<span class="key" style="background:{COLOURS[kind]}"></span>{text(kind)}'


def stacked_bars(
    bars: Sequence[tuple[str, Mapping[str, int]]], *, limit: int | None, thin: bool = False
) -> str:
    """One bar a source over one scale; segments carry their name where there is room."""
    full = max([limit or 0, *(sum(parts.values()) for _, parts in bars)]) or 1
    rows = "".join(_bar(name, parts, full, limit) for name, parts in bars)
    return f'<div class="bars{" thin" if thin else ""}">{rows}</div>'


def _bar(name: str, parts: Mapping[str, int], full: int, limit: int | None) -> str:
    total = sum(parts.values())
    segments = "".join(_segment(kind, n, full) for kind, n in parts.items() if n)
    mark = ""
    if limit is not None:
        at = limit / full
        title = f"limit {units.show_bytes(limit)}"
        mark = f'<div class="limit" style="left:calc({at:.4%} - 2px)" title="{text(title)}"></div>'
    return (
        f'<div class="bar"><span>{text(name)}</span><div class="track">'
        f'<div class="fill">{segments}</div>{mark}</div>'
        f'<span class="n">{text(units.show_bytes(total))}</span></div>'
    )


def _segment(kind: str, nbytes: int, full: int) -> str:
    share = nbytes / full
    label = text(kind) if share >= ENOUGH_FOR_A_LABEL else ""
    title = text(f"{kind}: {units.show_bytes(nbytes)} ({nbytes:,} B)")
    style = f"width:{share:.4%};background:{COLOURS[kind]};color:{INKS[kind]}"
    return f'<div class="seg" style="{style}" title="{title}">{label}</div>'


def phase_bars(peaks: Mapping[str, int], *, full: int, peak_phase: str) -> str:
    """One thin bar a phase; the peak is named in words."""
    rows = []
    for phase, nbytes in peaks.items():
        name = text(PHASES.get(phase, phase)) + (" <b>(peak)</b>" if phase == peak_phase else "")
        width = nbytes / (full or 1)
        rows.append(
            f'<div class="bar"><span>{name}</span><div class="track"><div class="fill">'
            f'<div class="seg" style="width:{width:.4%};background:var(--accent)"></div>'
            "</div></div>"
            f'<span class="n">{text(units.show_bytes(nbytes))}</span></div>'
        )
    return f'<div class="bars thin">{"".join(rows)}</div>'


def curve(training: Points, held_out: Points, what: str = "training loss") -> str:
    """The losses, or rewards, over the steps; labels outside the drawing never shrink."""
    drawn = [[p for p in points if isfinite(p[1])] for points in (training, held_out)]
    known = [p for points in drawn for p in points]
    if len(known) < 2:
        return ""
    low, high = min(v for _, v in known), max(v for _, v in known)
    first, last = min(s for s, _ in known), max(s for s, _ in known)

    def line(points: Points, name: str) -> str:
        spots = " ".join(
            f"{1000 * (s - first) / ((last - first) or 1):.1f},"
            f"{10 + 280 * (high - v) / ((high - low) or 1):.1f}"
            for s, v in points
        )
        return f'<polyline class="{name}" points="{spots}" vector-effect="non-scaling-stroke"/>'

    lines = line(drawn[0], "train") + (line(drawn[1], "held") if len(drawn[1]) > 1 else "")
    middle = (low + high) / 2
    label = f"{what} from {drawn[0][0][1]:.3f} to {drawn[0][-1][1]:.3f}" if drawn[0] else ""
    return (
        f'<div class="curve"><div class="ys"><span>{high:.3g}</span><span>{middle:.3g}</span>'
        f'<span>{low:.3g}</span></div><svg viewBox="0 0 1000 300" preserveAspectRatio="none" '
        f'role="img" aria-label="{text(label)}">{lines}</svg>'
        f'<div class="xs"><span>step {first:,}</span><span>step {last:,}</span></div></div>'
    )
