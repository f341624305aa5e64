"""What `memfit export` wrote: files, the peak there, and what the target cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.screens.layout import bullets, next_commands, say
from memfit.screens.terminal import Console

if TYPE_CHECKING:
    from memfit.export import Export


def show_export(console: Console, made: Export, written: Sequence[Path]) -> None:
    """Where the files lie, and what to know of them."""
    version = f" {made.version}" if made.version else ""
    say(console, f"Plan {made.recipe_digest} for {made.target}{version}", style="bold")
    say(console, f"predicted peak of a device there: {made.peak.words}")
    bullets(console, "Wrote", map(str, written))
    left = [f"{key}: {why}" for key, why in made.left_out.items()]
    bullets(console, f"Not said: {made.target} has no key for it", left)
    next_commands(console, [made.start])
