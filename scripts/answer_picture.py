"""docs/answer.svg: the screen of one real `memfit plan`, drawn as a terminal shows it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "answer.svg"
COMMAND = "memfit plan qwen3-8b --device 4090 --qlora --seq-len 8k"
COLUMNS = 80
WIDTH, HEIGHT, MARGIN = 8.4, 19, 16  # of a cell, of a line, and around them, in pixels
INK, PAPER, PROMPT = "#d8dee9", "#1b1f27", "#8fbcbb"
SGR = re.compile(r"\x1b\[([0-9;]*)m")
NAMED = {31: "#ff7b72", 32: "#56d364", 33: "#e3b341", 36: "#76e3ea"}  # ANSI's, light on dark


def screen() -> str:
    """What the command prints to a terminal with colours."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(COMMAND)], capture_output=True, text=True, check=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "COLORTERM": "truecolor",
             "PYTHONIOENCODING": "utf-8", "NO_COLOR": "", "TERM": "xterm",
             "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    return done.stdout


def spans(line: str) -> Iterator[tuple[int, str, str]]:
    """Of one line, each styled piece: its column, its text, and its style as SVG's attributes."""
    style, column = "", 0
    for at, piece in enumerate(SGR.split(line)):
        if at % 2:
            style = _style([int(code) for code in piece.split(";") if code])
        elif piece:
            yield column, piece, style
            column += len(piece)


def _style(codes: list[int]) -> str:
    found, colour = "", ""
    if codes[:2] == [38, 2]:
        colour = "#" + "".join(f"{part:02x}" for part in codes[2:5])
        codes = codes[5:]
    for code in codes:
        colour = NAMED.get(code, colour)
        found += {1: ' font-weight="bold"', 2: ' opacity="0.7"'}.get(code, "")
    return found + (f' fill="{colour}"' if colour else "")


def picture() -> str:
    """The SVG: a prompt with the command, then the screen, line by line."""
    lines = [f"\x1b[1m$ {COMMAND}\x1b[0m", "", *screen().splitlines()]
    width, height = MARGIN * 2 + WIDTH * COLUMNS, MARGIN * 2 + HEIGHT * len(lines)
    plain = SGR.sub("", " ".join(lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"'
        f' width="{width:.0f}" height="{height}" role="img"'
        f" font-family=\"ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace\""
        f' font-size="14" fill="{INK}">',
        f"<title>{escape(' '.join(plain.split()))}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
    ]
    for row, line in enumerate(lines):
        y = MARGIN + HEIGHT * row + 14
        for column, text, style in spans(line):
            if shown := text.strip(" "):
                x = MARGIN + (column + len(text) - len(text.lstrip(" "))) * WIDTH
                length = len(shown) * WIDTH
                text = shown.replace(" ", "\N{NO-BREAK SPACE}")  # which SVG does not collapse
                parts.append(
                    f'<text x="{x:.1f}" y="{y}" textLength="{length:.1f}"'
                    f' lengthAdjust="spacingAndGlyphs"{style}>{escape(text)}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])
