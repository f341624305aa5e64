"""The screen of two certificates side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.core import units
from memfit.core.wording import PHASES, VERDICTS
from memfit.records.results import Change, Diff, Side, Tensor
from memfit.screens.widgets.layout import INDENT, STYLES, heading, make_table, plain, say, show
from memfit.screens.widgets.tensors import NOWHERE, show_tensors
from memfit.screens.widgets.terminal import Console, Styled

ROWS, TENSORS = 16, 8  # of each table
MEANING = {
    "peak_allocated": "peak allocated", "peak_reserved": "peak reserved",
    "device_total": "device total", "usable": "may be used",
}  # fmt: skip


def show_diff(console: Console, diff: Diff) -> None:
    """The whole screen of `memfit diff`."""
    for letter, side in (("A", diff.a), ("B", diff.b)):
        _show_side(console, letter, side)
    numbers = [c for c in diff.numbers if (c.a, c.b) != (None, None)]
    _show_changes(console, "Memory", numbers, MEANING, every=True)
    _show_values(console, "Recipe", diff.recipe)
    _show_values(console, "Versions", diff.versions)
    _show_changes(console, "By instant", diff.phases, PHASES, every=True)
    words = {c.name: _component(c.name) for c in diff.components}
    _show_changes(console, "By instant and kind", diff.components, words)
    _show_changes(console, "By module at the peak", diff.modules, {"": NOWHERE})
    _show_tensors(console, "Only in B at the peak", diff.appeared)
    _show_tensors(console, "Only in A at the peak", diff.disappeared)


def _show_side(console: Console, letter: str, side: Side) -> None:
    word = Styled(VERDICTS[side.verdict], STYLES[side.verdict])
    what = Styled(plain(console, f"  {side.model} on {side.device}"))
    show(console, [Styled(f"{letter}  "), word, what], indent=0)
    phase = PHASES.get(side.peak_phase, side.peak_phase)
    line = f"{side.name}: recipe {side.recipe_digest}, peak in {phase}"
    say(console, line, style="dim", indent=3)


def _component(name: str) -> str:
    """`backward/activations` -> `backward, activations`."""
    phase, _, kind = name.partition("/")
    return f"{PHASES.get(phase, phase)}, {kind}"


def _bytes(n: int | None) -> str:
    return "-" if n is None else units.show_bytes(n)


def _signed(difference: int | None) -> str:
    if difference is None:
        return "-"
    if difference == 0:
        return "0"
    return ("+" if difference > 0 else "-") + units.show_bytes(abs(difference))


def _show_changes(
    console: Console,
    title: str,
    changes: Sequence[Change],
    words: Mapping[str, str],
    *,
    every: bool = False,
) -> None:
    """A table of both and their difference; without `every`, of what differs."""
    rows = [c for c in changes if every or c.difference or (c.a is None) != (c.b is None)]
    heading(console, title)
    if not rows:
        say(console, "no difference", indent=INDENT)
        return
    numbers = ("A", "B", "B - A")
    table = make_table("", *numbers, numbers=numbers)
    for c in rows if every else rows[:ROWS]:
        name = plain(console, words.get(c.name, c.name))
        table.add_row(name, _bytes(c.a), _bytes(c.b), _signed(c.difference))
    show(console, table)
    if not every:
        _show_rest(console, len(rows), ROWS, len(changes) - len(rows))


def _show_rest(console: Console, rows: int, shown: int, equal: int) -> None:
    parts = [f"{rows - shown} more that differ: --json has all"] if rows > shown else []
    parts += [f"{equal} without a difference"] if equal else []
    if parts:
        say(console, "; ".join(parts), style="dim", indent=INDENT)


def _show_values(console: Console, title: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    heading(console, title)
    if not values:
        say(console, "no difference", indent=INDENT)
    for name, (old, new) in values.items():
        say(console, f"{name}: {_value(old)} -> {_value(new)}", indent=INDENT)


def _value(value: Any) -> str:
    return "not there" if value is None else "-" if value == "" else str(value)


def _show_tensors(console: Console, title: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        return
    heading(console, title)
    show_tensors(console, tensors[:TENSORS])
    _show_rest(console, len(tensors), TENSORS, 0)
