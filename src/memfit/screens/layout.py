"""The few pieces that every screen is made of: console, heading, table, list, next commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDEST = 120  # longer lines are harder to read, however wide the terminal
WIDE = 100  # from here on there is room for more columns
INDENT = 2
STYLES = {
    "fits": "bold green",
    "at_risk": "bold yellow",
    "does_not_fit": "bold red",
    "unproven": "bold cyan",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to whoever runs the verb, instead of exit code 1."""
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """A console that obeys NO_COLOR, COLUMNS and pipes; 80 columns without a terminal."""
    console = _Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    return console


def is_ascii(console: Console) -> bool:
    """Whether the terminal's encoding cannot show more than ASCII."""
    return not console.encoding.lower().startswith("utf")


def tick(console: Console) -> str:
    """The mark of what was chosen."""
    return "*" if is_ascii(console) else "✔"


def plain(console: Console, text: str) -> str:
    """The text without control characters; what the encoding cannot show becomes `?`."""
    shown = printable(text)
    return shown.encode("ascii", "replace").decode() if is_ascii(console) else shown


def printable(text: str) -> str:
    """A model's or a user's text must not be able to steer the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def heading(console: Console, title: str) -> None:
    """A blank line and a title."""
    console.print()
    say(console, title, style="bold")


def make_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table without lines; the columns named in `numbers` are set right and never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for name in columns:
        right = name in numbers
        table.add_column(
            name, justify="right" if right else "left", no_wrap=right, overflow="fold",
        )  # fmt: skip
    return table


def show(console: Console, piece: RenderableType, *, indent: int = INDENT) -> None:
    """Print a piece of a screen, set in under its heading, without trailing blanks."""
    options = console.options.update(width=console.width - indent)
    for segments in console.render_lines(piece, options, pad=False):
        line = Text(" " * indent)
        for segment in segments:
            line.append(segment.text, style=segment.style)
        line.rstrip()
        console.print(line, soft_wrap=True)


def say(console: Console, words: str, *, style: str = "", indent: int = 0) -> None:
    """Running text, wrapped, in characters that the terminal has."""
    show(console, Text(plain(console, words), style=style), indent=indent)


def bullets(console: Console, title: str, lines: Iterable[str]) -> None:
    """A titled list; nothing when there is nothing to list."""
    lines = list(lines)
    if not lines:
        return
    heading(console, title)
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("-", plain(console, line))
    show(console, grid)


def next_commands(console: Console, commands: Iterable[str]) -> None:
    """What to type next; a long one is continued as a shell reads it, so that it can be copied."""
    commands = list(commands)
    if not commands:
        return
    heading(console, "Next")
    for command in commands:
        for line in continue_lines(command, console.width - INDENT):
            console.print(Text(" " * INDENT + plain(console, line), style="cyan"), soft_wrap=True)


def continue_lines(command: str, width: int) -> list[str]:
    """The command broken at its own blanks with a backslash, outside quotes, where it is long."""
    lines, line = [], ""
    for word in _words(command):
        if line and len(line) + 1 + len(word) > width - 2:
            lines.append(f"{line} \\")
            line = "    " + word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _words(command: str) -> list[str]:
    """Split at blanks that no quote holds; the quotes stay."""
    words = [""]
    quote = ""
    for character in command:
        if character == " " and not quote:
            words.append("")
            continue
        if character in "'\"" and quote in ("", character):
            quote = "" if quote else character
        words[-1] += character
    return words
