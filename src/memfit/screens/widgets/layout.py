"""The few pieces that every screen is made of: console, heading, table, list, next commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.screens.widgets.terminal import Column, Console, Line, Styled, Table, wrap

WIDEST = 120  # longer lines are harder to read, however wide the terminal
WIDE = 100  # from here on there is room for more columns
INDENT = 2
STYLES = {
    "fits": "bold green",
    "at_risk": "bold yellow",
    "does_not_fit": "bold red",
    "unproven": "bold cyan",
}


def make_console() -> Console:
    """Standard output, at most 120 columns wide; 80 without a terminal."""
    console = Console()
    console.width = min(console.width, WIDEST)
    return console


def tick(console: Console) -> str:
    """The mark of what was chosen."""
    return "*" if console.ascii_only else "✔"


def plain(console: Console, text: str) -> str:
    """The text without control characters; what the encoding cannot show becomes `?`."""
    shown = printable(text)
    return shown.encode("ascii", "replace").decode() if console.ascii_only else shown


def printable(text: str) -> str:
    """A model's or a user's text must not be able to steer the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def heading(console: Console, title: str) -> None:
    """A blank line and a title."""
    console.write()
    say(console, title, style="bold")


def make_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table without lines; the columns named in `numbers` are set right and never wrapped."""
    return Table(Column(name, number=name in numbers) for name in columns)


def show(console: Console, piece: Table | Line, *, indent: int = INDENT) -> None:
    """Print a table or a line of a screen, set in under its heading."""
    lines = piece.lines(console.width - indent) if isinstance(piece, Table) else [piece]
    for line in lines:
        console.write([Styled(" " * indent), *line])


def say(console: Console, words: str, *, style: str = "", indent: int = 0) -> None:
    """Running text, wrapped, in characters that the terminal has."""
    for line in wrap(plain(console, words), console.width - indent):
        console.write([Styled(" " * indent), Styled(line, style)])


def bullets(console: Console, title: str, lines: Iterable[str]) -> None:
    """A titled list; nothing when there is nothing to list."""
    lines = list(lines)
    if not lines:
        return
    heading(console, title)
    for line in lines:
        first, *rest = wrap(plain(console, line), console.width - INDENT - 2)
        console.write([Styled(" " * INDENT + "- " + first)])
        for more in rest:
            console.write([Styled(" " * (INDENT + 2) + more)])


def next_commands(console: Console, commands: Iterable[str]) -> None:
    """What to type next; a long one is continued as a shell reads it, so that it can be copied."""
    commands = list(commands)
    if not commands:
        return
    heading(console, "Next")
    for command in commands:
        for line in continue_lines(command, console.width - INDENT):
            console.write([Styled(" " * INDENT + plain(console, line), "cyan")])


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
