"""What `memfit check` read, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.screens.layout import bullets, say
from memfit.screens.plan import show_plan
from memfit.screens.terminal import Console

if TYPE_CHECKING:
    from memfit.check import Checked
    from memfit.results import Plan


def show_check(console: Console, checked: Checked, plan: Plan, *, why: bool) -> None:
    """The verdict and its breakdown as of any plan; then how the files were understood."""
    say(console, f"Read as {' and '.join(checked.tools)}", style="bold")
    show_plan(console, plan, commands=[], why=why)
    bullets(console, "Assumed of the files", checked.assumed)
    bullets(console, "Keys not looked at", checked.passed)
