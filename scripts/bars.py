"""Pictures of bytes: one bar a configuration, a colour a kind, on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from memfit.core.units import show_gib
from memfit.core.wording import COLOURS

ROW, LEFT, WIDTH, RIGHT = 26, 310, 500, 190  # pixels: a bar, its name, the scale, what is said


class Bar(NamedTuple):
    """A configuration."""

    name: str
    parts: Mapping[str, int]  # kind -> bytes; may be empty
    said: str  # to the right of it


def draw(bars: Sequence[Bar], *, usable: int | None = None) -> str:
    """An SVG; usable: bytes of the device, drawn as a line."""
    full = max([usable or 0, *(sum(bar.parts.values()) for bar in bars)]) or 1
    kinds = [kind for kind in COLOURS if any(_wide(bar, kind, full) for bar in bars)]
    height = ROW * (len(bars) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *_key(kinds),
    ]
    for at, bar in enumerate(bars):
        y, x = ROW * (at + 1.2), float(LEFT)
        parts.append(f'<text x="8" y="{y + 14:.0f}">{escape(bar.name)}</text>')
        for kind in COLOURS:
            wide = WIDTH * bar.parts.get(kind, 0) / full
            if wide >= 0.1:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{ROW - 8}"'
                    f' fill="{COLOURS[kind]}"/>'
                )
            x += wide
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 14:.0f}">{escape(bar.said)}</text>')
    if usable is not None:
        x = LEFT + WIDTH * usable / full
        parts.append(
            f'<line x1="{x:.1f}" y1="{ROW}" x2="{x:.1f}" y2="{height - ROW}" stroke="#b3261e"'
            f' stroke-dasharray="4 3"/><text x="{x:.1f}" y="{height - 8}" text-anchor="middle"'
            f' fill="#b3261e">usable {show_gib(usable)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _wide(bar: Bar, kind: str, full: int) -> bool:
    """Whether a part can be seen."""
    return WIDTH * bar.parts.get(kind, 0) / full >= 1


def _key(kinds: Sequence[str]) -> list[str]:
    step = 118
    return [
        f'<rect x="{8 + at * step}" y="6" width="10" height="10" fill="{COLOURS[kind]}"/>'
        f'<text x="{22 + at * step}" y="15">{kind}</text>'
        for at, kind in enumerate(kinds)
    ]
