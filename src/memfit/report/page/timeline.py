"""timeline.html: the memory of a certified step, event by event, on one self-contained page.

The drawing is SVG made here and needs no script; a few lines of plain JavaScript, which the page's
Content-Security-Policy names by their hash, add the reading under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from math import floor, log10

import msgspec

from memfit.core import units
from memfit.core.wording import COLOURS, PHASES, VERDICTS
from memfit.plan.memory.verdict import needs
from memfit.records.results import Certificate, Tensor
from memfit.report.curve import Curve, pack
from memfit.report.page.parts import dotted, key, section, table, text
from memfit.report.page.style import STYLE
from memfit.report.page.timeline_script import LOOK, SCRIPT

HEIGHT = 360.0  # of the drawing's own coordinates; across, an event is one of them
ROOM = 1.14  # of the highest line: the peak's figure stands above it
FAR = 1.6  # a limit further above the peak than this is told, not drawn
BLOCKS = 40  # rows of the table
BUTTONS = (  # the script shows them
    '<p id="zoom" hidden><button type="button" id="to-peak">Show the peak</button> '
    '<button type="button" id="in" aria-label="zoom in">+</button> '
    '<button type="button" id="out" aria-label="zoom out">−</button> '
    '<button type="button" id="whole">Whole step</button></p>'
)
NARROW = 0.05  # of the width; a phase narrower than this has its name in the reading only
WIDE = 0.3  # and than this, on a telephone


def render_timeline(curve: Curve, certificate: Certificate) -> str:
    """The whole page."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    recipe = certificate.recipe
    title = f"{recipe.model.name} on {recipe.placed_on}: memory of the certified step"
    body = "".join(
        (
            _header(title, certificate),
            section(
                "Memory over the step's allocations and releases", *_drawing(curve, certificate)
            ),
            section("Alive at the peak, largest first", _blocks(certificate.at_peak)),
            section("Holds for", f"<ul>{_items(certificate.bounds)}</ul>"),
        )
    )
    data = msgspec.json.encode(pack(curve)).decode().replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>memfit: {text(title)}</title><style>{STYLE}{LOOK}</style></head>\n"
        f"<body><main>{body}</main>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{text(line)}</li>" for line in lines)


def _figure(value: int | None, what: str) -> str:
    shown = "unknown" if value is None else units.show_bytes(value)
    return f'<div class="figure"><b>{text(shown)}</b><span>{text(what)}</span></div>'


def _header(title: str, certificate: Certificate) -> str:
    memory, versions = certificate.memory, certificate.versions
    figures = [_figure(memory.peak_allocated, "peak allocated")]
    if memory.peak_reserved is not None:
        figures.append(_figure(memory.peak_reserved, "peak reserved by the allocator"))
        figures.append(_figure(memory.device_total, "device total, with the context"))
    figures.append(_figure(memory.usable, "may be used"))
    left = "" if memory.usable is None else _room(memory.usable - needs(memory))
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f'<header><h1>{text(title)}</h1><p class="soft">recipe '
        f"<code>{text(certificate.recipe_digest)}</code>; {text(libraries)}</p>"
        f'<p><span class="verdict {memory.verdict}" role="status">{VERDICTS[memory.verdict]}</span>'
        f'{text(left)}</p><div class="figures">{"".join(figures)}</div></header>\n'
    )


def _room(left: int) -> str:
    return f"{units.show_bytes(abs(left))} {'to spare' if left >= 0 else 'too much'}"


def _drawing(curve: Curve, certificate: Certificate) -> tuple[str, ...]:
    """The plot with its labels, its legend, and the place of the reading."""
    memory = certificate.memory
    highest = max((max(sum(p.kinds), p.reserved or 0) for p in curve.points), default=0) or 1
    limit = memory.usable
    if limit is not None and memory.device_total is not None and memory.peak_reserved is not None:
        limit -= memory.device_total - memory.peak_reserved  # what the context leaves of it
    drawn = limit if limit is not None and 0 < limit <= highest * FAR else None
    top = max(highest, drawn or 0) * ROOM
    plot = (
        f'<div class="plot">{_labels(curve, top)}'
        f'<svg id="svg" viewBox="0 0 {_width(curve)} {HEIGHT:.0f}" preserveAspectRatio="none" '
        f'tabindex="0" role="img" aria-label="{text(_words(curve))}">'
        f"{_bands(curve)}{_areas(curve, top)}{_lines(curve, top, drawn)}</svg>"
        f"{_peak(curve, top)}</div>{BUTTONS}"
    )
    names = "".join(f"<span>{key(kind)}</span>" for kind in curve.kinds)
    if curve.points and curve.points[-1].reserved is not None:
        names += '<span><i class="stroke"></i>reserved by the allocator</span>'
    if drawn is not None:
        names += '<span><i class="stroke l"></i>limit, less the context</span>'
    reading = '<div id="read" aria-live="polite">Point at the drawing to read an event.</div>'
    return plot, f'<p class="legend">{names}</p>', reading, _note(curve, limit, drawn)


def _note(curve: Curve, limit: int | None, drawn: int | None) -> str:
    notes = [
        f"{curve.events:,} allocations and releases in order, not in time. In the drawing the "
        "arrow keys step through them, + and - change the view, P shows the peak, and a drag "
        "shows a part."
    ]
    if len(curve.points) < curve.events:
        notes.append(
            f"Drawn: {len(curve.points):,} of them, the highest and the lowest of each stretch, so "
            "that no peak is left out, and all around the highest peak."
        )
    if limit is not None and drawn is None:
        notes.append(f"The limit, {units.show_bytes(max(limit, 0))}, is outside the drawing.")
    return f'<p class="soft small">{text(" ".join(notes))}</p>'


def _words(curve: Curve) -> str:
    peak = curve.peak
    return (
        f"memory rises to {units.show_bytes(peak.total)} of tensors at event {peak.event:,} of "
        f"{curve.events:,}, in {PHASES.get(peak.phase, peak.phase)}"
    )


def _width(curve: Curve) -> int:
    return max(curve.events, 1)


def _y(nbytes: float, top: float) -> float:
    return HEIGHT * (1 - nbytes / top)


def _labels(curve: Curve, top: float) -> str:
    marks = []
    for nbytes in _ticks(top):
        at = f'<span class="y" style="top:{1 - nbytes / top:.2%}">'
        marks.append(f"{at}{text(units.show_bytes(nbytes))}</span>")
    for part, look in (
        (0.0, 'class="x" style="left:0"'),
        (0.5, 'class="x middle" style="left:50%"'),
        (1.0, 'class="x" style="right:0"'),
    ):
        marks.append(f"<span {look}>event {round(curve.events * part):,}</span>")
    for phase, start, stop in curve.stretches:
        left, width = start / _width(curve), (stop - start) / _width(curve)
        hidden = "" if width >= NARROW else " hidden"
        name = text(PHASES.get(phase, phase))
        look = "phase" if width >= WIDE else "phase narrow"
        marks.append(
            f'<span class="{look}" style="left:{left:.2%};width:{width:.2%}" data-from="{start}" '
            f'data-to="{stop}" title="{name}"{hidden}>{name}</span>'
        )
    return "".join(marks)


def _peak(curve: Curve, top: float) -> str:
    """An arrow onto the peak with its figure above it; neither covers it."""
    share, nbytes = curve.peak.event / _width(curve), sum(curve.peak.kinds)
    at = f"left:{share:.4%};bottom:{nbytes / top:.2%}"
    return (
        f'<div id="peak"><i style="{at}"></i>'
        f'<span style="{at};transform:translateX(-{share:.2%})">'
        f"peak {text(units.show_bytes(nbytes))}</span></div>"
    )


def _ticks(top: float) -> list[int]:
    """Round numbers of the largest fitting unit from 0 up to the top, four to eight of them."""
    unit = next((u for u in (units.GIB, units.MIB, 2**10) if top >= 2 * u), 1)
    whole = top / unit
    power = 10.0 ** floor(log10(whole / 4))
    step = max(f * power for f in (1, 2, 5) if f * power <= whole / 4)
    return [round(n * step * unit) for n in range(int(whole / step) + 1)]


def _bands(curve: Curve) -> str:
    pieces = []
    for number, (phase, start, stop) in enumerate(curve.stretches):
        name = text(PHASES.get(phase, phase))
        pieces.append(
            f'<rect class="band{" odd" if number % 2 else ""}" x="{start}" y="0" '
            f'width="{stop - start}" height="{HEIGHT:.0f}"><title>{name}</title></rect>'
            f'<line class="edge" x1="{start}" x2="{start}" y1="0" y2="{HEIGHT:.0f}" '
            'vector-effect="non-scaling-stroke"/>'
        )
    return "".join(pieces)


def _areas(curve: Curve, top: float) -> str:
    """One polygon a kind, each on what lies below it.

    They are drawn from the topmost down, each with an edge of a pixel: a spike that is narrower
    than a pixel is then as wide as its edge, and as high as it is.
    """
    below = [0] * len(curve.points)
    pieces = []
    for index, kind in enumerate(curve.kinds):
        above = [low + p.kinds[index] for low, p in zip(below, curve.points, strict=True)]
        spots = [*_spots(curve, above, top), *reversed(_spots(curve, below, top))]
        pieces.append(
            f'<polygon class="area" fill="{COLOURS[kind]}" stroke="{COLOURS[kind]}" '
            f'points="{" ".join(spots)}" vector-effect="non-scaling-stroke">'
            f"<title>{text(kind)}</title></polygon>"
        )
        below = above
    return "".join(reversed(pieces))


def _spots(curve: Curve, values: Sequence[int], top: float) -> list[str]:
    pairs = zip(curve.points, values, strict=True)
    return [f"{p.event},{_y(value, top):.1f}" for p, value in pairs]


def _lines(curve: Curve, top: float, limit: int | None) -> str:
    """What the allocator reserves, the limit, and the hair under the pointer."""
    fixed = 'vector-effect="non-scaling-stroke"'
    pieces = []
    reserved = [p for p in curve.points if p.reserved is not None]
    if reserved:
        spots = (f"{p.event},{_y(p.reserved or 0, top):.1f}" for p in reserved)
        pieces.append(f'<polyline class="reserved" points="{" ".join(spots)}" {fixed}/>')
    if limit is not None:
        y = f"{_y(limit, top):.1f}"
        line = f'x1="0" x2="{_width(curve)}" y1="{y}" y2="{y}"'
        pieces.append(f'<line class="halo" {line} {fixed}/>')
        pieces.append(f'<line class="limitline" {line} {fixed}><title>limit</title></line>')
    pieces.append(f'<line id="hair" y1="0" y2="{HEIGHT:.0f}" {fixed}/>')  # the script places it
    pieces.append(f'<rect id="dragged" y="0" height="{HEIGHT:.0f}" width="0"/>')
    return "".join(pieces)


def _blocks(tensors: Sequence[Tensor]) -> str:
    rows = [
        (
            text(t.kind),
            f"<code>{dotted(t.module or '(outside any module)')}</code>",
            f"<code>{dotted(t.op)}</code><br><code>{dotted(t.source)}</code>",
            f"{t.count:,} x {text(units.show_bytes(t.nbytes))}",
            text(units.show_bytes(t.total)),
        )
        for t in tensors[:BLOCKS]
    ]
    heads = ("kind", "module", "made by", "each", "together")
    more = len(tensors) - len(rows)
    rest = f'<p class="soft small">{more} more rows in certificate.json</p>' if more > 0 else ""
    return table(heads, rows, numbers=2, label="tensors at the peak") + rest
