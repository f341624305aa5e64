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

from memfit import units
from memfit.curve import Curve, pack
from memfit.plan.verdict import needs
from memfit.report_page.parts import dotted, key, section, table, text
from memfit.report_page.style import STYLE
from memfit.results import Certificate, Tensor
from memfit.words import COLOURS, PHASES, VERDICTS

WIDTH, HEIGHT = 1000.0, 360.0  # of the drawing's own coordinates
ROOM = 1.04  # of the highest line, so that it does not touch the frame
FAR = 1.6  # a limit further above the peak than this is told, not drawn
BLOCKS = 40  # rows of the table
NARROW = 0.05  # of the width; a phase narrower than this has its name in the reading only
WIDE = 0.3  # and than this, on a telephone
LOOK = """
.plot{position:relative;margin:28px 0 22px 74px}
.plot svg{display:block;width:100%;height:380px;background:var(--bg);border:1px solid var(--line)}
.plot svg:focus{outline:2px solid var(--accent)}
.y,.x,.phase{position:absolute;font-size:.76rem;color:var(--soft);white-space:nowrap;
font-variant-numeric:tabular-nums}
.y{right:100%;transform:translateY(-50%);padding-right:8px}
.x{top:100%;padding-top:3px}
.middle{transform:translateX(-50%)}
.here{position:absolute;top:3px;padding:0 5px;font-size:.76rem;font-weight:600}
.phase{bottom:100%;padding:0 0 3px 3px;overflow:hidden;text-overflow:ellipsis}
.band{fill:var(--soft);opacity:.09}.band.odd{opacity:0}
.edge{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3;opacity:.6}
.reserved{fill:none;stroke:var(--ink);stroke-width:1.5}
.halo{stroke:var(--card);stroke-width:5;opacity:.8}
.limitline{stroke:var(--does_not_fit);stroke-width:2;stroke-dasharray:8 4}
.peak{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:3 3}
#hair{stroke:var(--accent);stroke-width:1.5}
.legend>span{margin-right:16px;white-space:nowrap;font-size:.85rem}
.stroke{display:inline-block;width:20px;height:0;margin-right:6px;vertical-align:4px;
border-top:2px solid var(--ink)}
.stroke.l{border-top:2px dashed var(--does_not_fit)}
#read{min-height:7.2em;margin-top:8px;border:1px solid var(--line);border-radius:8px;
padding:8px 12px;font-size:.88rem;overflow-wrap:anywhere}
@media (max-width:560px){.plot{margin-left:62px}.plot .narrow,.plot .middle{display:none}}
"""
SCRIPT = """
(function(){
var d=JSON.parse(document.getElementById("data").textContent),p=d.points;
var svg=document.getElementById("svg"),hair=document.getElementById("hair");
var read=document.getElementById("read"),at=d.peak;
function size(n){var u=["B","KiB","MiB","GiB","TiB"],i=0;
while(Math.abs(n)>=1024&&i<4){n/=1024;i++}return(i?n.toFixed(2):n)+" "+u[i]}
function line(s){var e=document.createElement("div");e.textContent=s;read.appendChild(e)}
function show(i){at=Math.max(0,Math.min(p.length-1,i));var q=p[at],s=d.strings;
var x=q[0]/d.events*1000;hair.setAttribute("x1",x);hair.setAttribute("x2",x);
read.textContent="";
line("event "+q[0].toLocaleString("en")+" of "+d.events.toLocaleString("en")+", "+s[q[2]]
+(at===d.peak?" (the peak)":""));
line(s[q[3]]);
line("tensors "+size(q[1])+(q[5]?", reserved "+size(q[5]):""));
var k=[];d.kinds.forEach(function(n,j){if(q[6][j])k.push(n+" "+size(q[6][j]))});
line(k.join(", "));if(s[q[4]])line(s[q[4]])}
function near(x){var a=0,b=p.length-1;while(a<b){var m=(a+b)>>1;
if(p[m][0]<x)a=m+1;else b=m}return a&&x-p[a-1][0]<p[a][0]-x?a-1:a}
svg.addEventListener("pointermove",function(e){var r=svg.getBoundingClientRect();
show(near((e.clientX-r.left)/r.width*d.events))});
svg.addEventListener("keydown",function(e){
var by={ArrowLeft:-1,ArrowRight:1,PageUp:-25,PageDown:25}[e.key];
if(by){e.preventDefault();show(at+by)}});
show(d.peak)})();
"""


def render_timeline(curve: Curve, certificate: Certificate) -> str:
    """The whole page."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    recipe = certificate.recipe
    title = f"{recipe.model.name} on {recipe.device}: memory of the certified step"
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
        f'<svg id="svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" '
        f'tabindex="0" role="img" aria-label="{text(_words(curve))}">'
        f"{_bands(curve)}{_areas(curve, top)}{_lines(curve, top, drawn)}</svg></div>"
    )
    names = "".join(f"<span>{key(kind)}</span>" for kind in curve.kinds)
    if curve.points and curve.points[-1].reserved is not None:
        names += '<span><i class="stroke"></i>reserved by the allocator</span>'
    if drawn is not None:
        names += '<span><i class="stroke l"></i>limit, less the context</span>'
    reading = '<div id="read" aria-live="polite">Point at the drawing to read an event.</div>'
    return plot, f'<p class="legend">{names}</p>', reading, _note(curve, limit, drawn)


def _note(curve: Curve, limit: int | None, drawn: int | None) -> str:
    said = [
        f"{curve.events:,} allocations and releases in order, not in time; the arrow keys step "
        "through the drawing."
    ]
    if len(curve.points) < curve.events:
        said.append(
            f"Drawn: {len(curve.points):,} of them, the highest and the lowest of each stretch, so "
            "that no peak is left out."
        )
    if limit is not None and drawn is None:
        said.append(f"The limit, {units.show_bytes(max(limit, 0))}, is outside the drawing.")
    return f'<p class="soft small">{text(" ".join(said))}</p>'


def _words(curve: Curve) -> str:
    peak = curve.peak
    return (
        f"memory rises to {units.show_bytes(peak.total)} of tensors at event {peak.event:,} of "
        f"{curve.events:,}, in {PHASES.get(peak.phase, peak.phase)}"
    )


def _x(curve: Curve, event: int) -> float:
    return WIDTH * event / max(curve.events, 1)


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
    share = curve.peak.event / max(curve.events, 1)
    side = f"right:{1 - share:.2%}" if share > 0.5 else f"left:{share:.2%}"
    marks.append(f'<span class="here" style="{side}">peak</span>')
    for phase, start, stop in curve.stretches:
        left, width = start / max(curve.events, 1), (stop - start) / max(curve.events, 1)
        if width >= NARROW:
            place = f"left:{left:.2%};width:{width:.2%}"
            said = text(PHASES.get(phase, phase))
            look = "phase" if width >= WIDE else "phase narrow"
            marks.append(f'<span class="{look}" style="{place}" title="{said}">{said}</span>')
    return "".join(marks)


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
        left, right = _x(curve, start), _x(curve, stop)
        name = text(PHASES.get(phase, phase))
        pieces.append(
            f'<rect class="band{" odd" if number % 2 else ""}" x="{left:.2f}" y="0" '
            f'width="{right - left:.2f}" height="{HEIGHT:.0f}"><title>{name}</title></rect>'
            f'<line class="edge" x1="{left:.2f}" x2="{left:.2f}" y1="0" y2="{HEIGHT:.0f}" '
            'vector-effect="non-scaling-stroke"/>'
        )
    return "".join(pieces)


def _areas(curve: Curve, top: float) -> str:
    """One polygon a kind, each on what lies below it."""
    below = [0] * len(curve.points)
    pieces = []
    for index, kind in enumerate(curve.kinds):
        above = [low + p.kinds[index] for low, p in zip(below, curve.points, strict=True)]
        spots = [*_spots(curve, above, top), *reversed(_spots(curve, below, top))]
        pieces.append(
            f'<polygon fill="{COLOURS[kind]}" points="{" ".join(spots)}">'
            f"<title>{text(kind)}</title></polygon>"
        )
        below = above
    return "".join(pieces)


def _spots(curve: Curve, values: Sequence[int], top: float) -> list[str]:
    pairs = zip(curve.points, values, strict=True)
    return [f"{_x(curve, p.event):.2f},{_y(value, top):.1f}" for p, value in pairs]


def _lines(curve: Curve, top: float, limit: int | None) -> str:
    """What the allocator reserves, the limit, the peak, and the hair under the pointer."""
    fixed = 'vector-effect="non-scaling-stroke"'
    pieces = []
    reserved = [p for p in curve.points if p.reserved is not None]
    if reserved:
        spots = (f"{_x(curve, p.event):.2f},{_y(p.reserved or 0, top):.1f}" for p in reserved)
        pieces.append(f'<polyline class="reserved" points="{" ".join(spots)}" {fixed}/>')
    if limit is not None:
        y = f"{_y(limit, top):.1f}"
        line = f'x1="0" x2="{WIDTH:.0f}" y1="{y}" y2="{y}"'
        pieces.append(f'<line class="halo" {line} {fixed}/>')
        pieces.append(f'<line class="limitline" {line} {fixed}><title>limit</title></line>')
    x = f"{_x(curve, curve.peak.event):.2f}"
    for name in ('class="peak"', 'id="hair"'):
        line = f'x1="{x}" x2="{x}" y1="0" y2="{HEIGHT:.0f}"'
        pieces.append(f"<line {name} {line} {fixed}/>")
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
    said = f'<p class="soft small">{more} more rows in certificate.json</p>' if more > 0 else ""
    return table(heads, rows, numbers=2, label="tensors at the peak") + said
