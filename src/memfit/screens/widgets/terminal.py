"""Text in a terminal: width, colour, wrapping, tables. Small on purpose.

A general library would take 45 ms to start, a fifth of what a plan may take from the command to
the verdict; these screens need lines, four styles, one colour a kind, and tables without rules.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TextIO

from memfit.core.system.streams import in_one_line

CODES = {
    "bold": "1", "dim": "2", "italic": "3", "red": "31", "green": "32", "yellow": "33",
    "cyan": "36",
}  # fmt: skip
GAP = 2  # cells between columns
NARROWEST = 6  # of a column that is wrapped


class Styled(NamedTuple):
    """Some text and how it looks: words of `CODES`, or a colour such as `#0072B2`."""

    text: str
    style: str = ""


Line = Sequence[Styled]


class Console:
    """Where a screen goes: a stream, its width in cells, its colours and characters."""

    def __init__(
        self, file: TextIO | None = None, *, width: int | None = None, colour: bool | None = None
    ) -> None:
        self.file = file or sys.stdout
        self.width = width or find_width(self.file)
        self.colour = shows_colour(self.file, os.environ) if colour is None else colour
        self.exact_colours = os.environ.get("COLORTERM") in ("truecolor", "24bit")
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        self.ascii_only = not encoding.lower().startswith("utf")

    def write(self, line: Line = ()) -> None:
        """One line, without trailing blanks."""
        spans = [Styled(in_one_line(text), *style) for text, *style in line]
        while spans and not spans[-1].text.strip(" "):
            spans.pop()
        if spans:
            spans[-1] = Styled(spans[-1].text.rstrip(" "), spans[-1].style)
        self.file.write("".join(map(self._paint, spans)) + "\n")

    def _paint(self, span: Styled) -> str:
        if not self.colour or not span.style or not span.text:
            return span.text
        codes = ";".join(self._code(word) for word in span.style.split())
        return f"\x1b[{codes}m{span.text}\x1b[0m"

    def _code(self, word: str) -> str:
        if not word.startswith("#"):
            return CODES[word]
        red, green, blue = (int(word[i : i + 2], 16) for i in (1, 3, 5))
        if self.exact_colours:
            return f"38;2;{red};{green};{blue}"
        cube = [round(c / 255 * 5) for c in (red, green, blue)]  # the 6 x 6 x 6 of 256 colours
        return f"38;5;{16 + 36 * cube[0] + 6 * cube[1] + cube[2]}"


def find_width(file: TextIO) -> int:
    """COLUMNS, else the terminal's, else 80."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdigit() and int(stated):
        return int(stated)
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):  # no terminal, or a stream without a descriptor
        return 80


def shows_colour(file: TextIO, environment: Mapping[str, str]) -> bool:
    """Terminals only, and not where NO_COLOR (no-color.org) or a dumb terminal says otherwise."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return bool(environment.get("FORCE_COLOR")) or file.isatty()


def cells(text: str) -> int:
    """Cells that a text takes: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` cells, broken at blanks, inside words only if it must.

    Line breaks and the blanks that begin a line stay.
    """
    lines: list[str] = []
    for paragraph in text.expandtabs(4).split("\n"):
        if cells(paragraph) <= width:
            lines.append(paragraph)
        elif not paragraph.strip():
            lines.append(_cut(paragraph, width)[0])
        else:
            lines += _wrap_paragraph(paragraph, width)
    return lines


def _wrap_paragraph(text: str, width: int) -> list[str]:
    lead = text[: len(text) - len(text.lstrip(" "))]
    lines, line = [], lead
    for word in text.split():
        joined = f"{line} {word}" if line.strip() else line + word
        if cells(joined) <= width:
            line = joined
            continue
        if line.strip():
            lines.append(line)
            line = ""
        *pieces, line = _cut(line + word, width)
        lines += pieces
    return [*lines, line]


def _cut(word: str, width: int) -> list[str]:
    """A word in pieces of at most `width` cells, always at least one."""
    pieces, piece = [], ""
    for character in word:
        if piece and cells(piece + character) > width:
            pieces.append(piece)
            piece = ""
        piece += character
    return [*pieces, piece]


class Column:
    """One column of a table; numbers stand right and are never broken."""

    def __init__(self, name: str, *, number: bool) -> None:
        self.name = name
        self.number = number
        self.no_wrap = number


class Table:
    """Rows of cells under headings, without rules; columns shrink until the table fits."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns = list(columns)
        self.show_header = True
        self.rows: list[tuple[list[Styled], str]] = []

    def add_row(self, *cells_: str | Styled, style: str = "") -> None:
        """One cell a column; `style` is of the whole row."""
        row = [c if isinstance(c, Styled) else Styled(c) for c in cells_]
        self.rows.append((row, style))

    def lines(self, width: int) -> list[list[Styled]]:
        """The table in lines of at most `width` cells."""
        rows = list(self.rows)
        if self.show_header and any(c.name for c in self.columns):
            rows.insert(0, ([Styled(c.name) for c in self.columns], "dim"))
        gap = GAP
        widths = self._widths(rows, width, gap)
        if sum(widths) + gap * (len(widths) - 1) > width:
            gap = 1
            widths = self._widths(rows, width, gap)
        return [line for row, style in rows for line in self._row(row, style, widths, gap)]

    def _widths(self, rows: Sequence[tuple[list[Styled], str]], width: int, gap: int) -> list[int]:
        """Natural widths; where they do not fit, the widest column gives first, numbers never."""
        widths = [
            max((cells(part) for row, _ in rows for part in row[i].text.split("\n")), default=0)
            for i in range(len(self.columns))
        ]
        over = sum(widths) + gap * (len(widths) - 1) - width
        words = [i for i, c in enumerate(self.columns) if not c.number]
        for group in ([i for i in words if not self.columns[i].no_wrap], words):
            while over > 0 and group:
                widest = max(group, key=lambda i: widths[i])
                if widths[widest] <= NARROWEST:
                    break
                widths[widest] -= 1
                over -= 1
        return widths

    def _row(
        self, row: Sequence[Styled], style: str, widths: Sequence[int], gap: int
    ) -> list[list[Styled]]:
        wrapped = [wrap(cell.text, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, wrapped))
        found = []
        for index in range(height):
            line: list[Styled] = []
            for i, part in enumerate(wrapped):
                text = part[index] if index < len(part) else ""
                blank = " " * (widths[i] - cells(text))
                text = blank + text if self.columns[i].number else text + blank
                line.append(Styled(text, f"{style} {row[i].style}".strip()))
                line.append(Styled(" " * gap))
            found.append(line)
        return found
