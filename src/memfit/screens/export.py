"""What `memfit export` wrote: files, the peak there, and what the target cannot say."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.screens.widgets.layout import bullets, next_commands, say
from memfit.screens.widgets.terminal import Console

if TYPE_CHECKING:
    from memfit.export.target import Export


def show_export(console: Console, made: Export, written: Sequence[Path]) -> None:
    """Where the files lie, and what to know of them."""
    version = f" {made.version}" if made.version else ""
    say(console, f"Plan {made.recipe_digest} for {made.target}{version}", style="bold")
    say(console, f"predicted peak of a device there: {made.peak.words}")
    bullets(console, "Wrote", map(str, written))
    changed = [f"{key}: {why}" for key, why in made.changed.items()]
    bullets(console, "Not as it was asked or planned", changed)
    left = [f"{key}: {why}" for key, why in made.left_out.items()]
    bullets(console, f"Not said: {made.target} has no key for it", left)
    bullets(console, "Needs", [need.words for need in made.needs])
    bullets(console, "Before you start", made.notes)
    folder = written[0].parent if written else Path()
    checked = [shlex.join(_from_here(made.check, made.files, folder))] if made.check else []
    into = f"cd {shlex.quote(str(folder))} && " if folder != Path() else ""
    next_commands(console, [*checked, f"{into}{made.start}"])


def _from_here(words: Sequence[str], files: Mapping[str, str], folder: Path) -> list[str]:
    """The command with the files as they are named from the folder where one is."""
    return [str(folder / word) if word in files else word for word in words]
