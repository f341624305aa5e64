"""A stacked bar of bytes against the usable line; each kind has a fill of its own and a colour."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core import units
from memfit.core.wording import COLOURS
from memfit.screens.widgets.terminal import Styled

Part = tuple[str, int]  # kind, bytes

# kind -> (fill, fill in ASCII)
FILLS = {
    "parameters": ("█", "P"),
    "gradients": ("▓", "G"),
    "optimizer_state": ("▒", "O"),
    "kv_cache": ("▤", "V"),
    "activations": ("░", "A"),
    "logits": ("▚", "L"),
    "temporary": ("▞", "T"),
    "input": ("▖", "I"),
    "all_gather": ("▀", "W"),
    "reduce_scatter": ("▄", "R"),
    "workspace": ("▌", "K"),
    "fragmentation": ("∙", "F"),
    "context": ("▪", "C"),
}


def fill(kind: str, *, ascii_only: bool) -> tuple[str, str]:
    """The character and the colour of a kind."""
    unicode, plain = FILLS[kind]
    return (plain if ascii_only else unicode), COLOURS[kind]


def stacked_bar(
    parts: Sequence[Part], *, line: int | None, width: int, ascii_only: bool = False
) -> list[Styled]:
    """One line of `width` cells: the parts in order, free space, and `|` where the limit is."""
    total = sum(n for _, n in parts)
    full = max(total, line or 0, 1)
    cells = width - (line is not None)
    drawn: list[Styled] = []
    reached = filled = 0
    for kind, nbytes in parts:
        reached += nbytes
        upto = round(reached / full * cells)
        character, colour = fill(kind, ascii_only=ascii_only)
        drawn.append(Styled(character * (upto - filled), colour))
        filled = upto
    drawn.append(Styled(" " * (cells - filled)))
    if line is None:
        return drawn
    return _mark(drawn, round(line / full * cells))


def _mark(drawn: Sequence[Styled], at: int) -> list[Styled]:
    """The spans with `|` before cell `at`."""
    marked: list[Styled] = []
    left = at
    for text, style in drawn:
        here = 0 <= left <= len(text) and Styled("|", "bold") not in marked
        if here:
            marked += [Styled(text[:left], style), Styled("|", "bold"), Styled(text[left:], style)]
        else:
            marked.append(Styled(text, style))
        left -= len(text)
    return marked


def scale(total: int, line: int | None, *, width: int) -> list[Styled]:
    """The line under a bar: 0 on the left, and the limit under its mark."""
    if line is None:
        return [Styled("0" + units.show_bytes(total).rjust(width - 1), "dim")]
    at = round(line / max(total, line, 1) * (width - 1))
    label = f"usable {units.show_bytes(line)}"
    start = max(2, min(at - len(label) + 1, width - len(label)))
    return [Styled("0".ljust(start) + label, "dim")]


def share_bar(share: float, *, width: int, ascii_only: bool = False) -> str:
    """A plain bar for one row of a table; at least one cell for what is not nothing."""
    cells = max(1, round(share * width)) if share > 0 else 0
    return ("#" if ascii_only else "■") * cells
