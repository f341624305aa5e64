"""A curve in a terminal: points in a grid of characters, with both axes labelled."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

Points = Sequence[tuple[int, float]]
HEIGHT = 8


def draw_curve(points: Points, *, width: int, height: int = HEIGHT, ascii_only: bool) -> list[str]:
    """Lines of a chart of (step, value); each column shows the mean of its steps.

    Values that are not finite are left out and counted in the last line.
    """
    known = [(step, value) for step, value in points if isfinite(value)]
    if not known:
        return ["no values"]
    low, high = min(v for _, v in known), max(v for _, v in known)
    labels = [_label(high - (high - low) * row / (height - 1)) for row in range(height)]
    margin = max(map(len, labels))
    means = _columns(known, width - margin - 2)
    mark, side, corner, floor = ("*", "|", "+", "-") if ascii_only else ("•", "│", "└", "─")
    rows = [[" "] * len(means) for _ in range(height)]
    for column, mean in enumerate(means):
        if mean is not None:
            share = (high - mean) / (high - low) if high > low else 0.5
            rows[round(share * (height - 1))][column] = mark
    lines = [
        f"{label.rjust(margin)} {side}{''.join(row).rstrip()}"
        for label, row in zip(labels, rows, strict=True)
    ]
    first, last = str(known[0][0]), str(known[-1][0])
    lines.append(" " * (margin + 1) + corner + floor * len(means))
    gap = max(1, len(means) - len(first) - len(last))
    between = "step".center(gap) if gap >= len(" step ") else " " * gap
    lines.append(f"{' ' * (margin + 2)}{first}{between}{last}")
    if lost := len(points) - len(known):
        lines.append(f"{lost} values are not finite and are not drawn")
    return lines


def _columns(points: Points, width: int) -> list[float | None]:
    """Mean value of the points that fall into each column; None where none does."""
    width = max(1, width)
    first, last = points[0][0], points[-1][0]
    if last - first + 1 < width:
        width = max(1, min(width, 2 * (last - first) + 1))
    buckets: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        share = (step - first) / (last - first) if last > first else 0.0
        buckets[min(width - 1, int(share * width))].append(value)
    return [sum(b) / len(b) if b else None for b in buckets]


def _label(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.2e}"
