"""What `memfit check` read, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memfit.core.units import show_bytes
from memfit.core.wording import VERDICTS
from memfit.screens.plan import show_plan
from memfit.screens.short import (
    FEW,
    MOST,
    WHOLE,
    Lines,
    describe_memory,
    describe_recipe,
    describe_time,
    list_assumed,
    text,
    write_lines,
)
from memfit.screens.widgets.layout import INDENT, STYLES, bullets, say
from memfit.screens.widgets.terminal import Console

# of verdicts that have a sentence of their own
WORDS = {
    name: (VERDICTS[name], STYLES[name]) for name in ("does_not_fit",)
} | {"not_known": ("NOT KNOWN", "bold yellow")}  # fmt: skip
MEANS = {
    "capacity": "the device has", "free": "free of it", "allocated": "in torch's tensors",
    "reserved": "held by torch", "outside": "held by others than torch's allocator",
}  # fmt: skip

OF_FILES = "Assumed of the files"
OUT_OF_MEMORY = "The out-of-memory message"
CHANGES = "Smallest changes that fit"
NO_CHANGE = "none of the keys that memfit knows"

if TYPE_CHECKING:
    from memfit.check import Checked
    from memfit.check.answers import Answer
    from memfit.check.keys import Undescribed
    from memfit.check.out_of_memory import Diagnosed
    from memfit.check.smaller_changes import Change
    from memfit.records.results import Plan


def show_check(
    console: Console,
    checked: Checked,
    answer: Answer,
    plan: Plan,
    smallest: Sequence[Change],
    found: Diagnosed | None,
    *,
    why: bool,
) -> None:
    """The verdict, what is not described, what would fit, and how the files were read.

    why: with the breakdown as of any plan, and every line of the lists; else 24 lines at most.
    """
    verdict = (*WORDS[answer.verdict], answer.headline) if answer.headline else None
    lists: dict[str, Sequence[str]] = {
        OUT_OF_MEMORY: [] if found is None else _explain(found),
        "Not described": [_name(one) for one in checked.undescribed],
        _head_changes(checked): [_say(one) for one in smallest] or [NO_CHANGE],
        OF_FILES: checked.assumed,
    }
    if plan.memory.is_within:
        del lists[_head_changes(checked)]
    if not why:
        _show_short(console, checked, plan, verdict, lists)
        return
    say(console, f"Read as {' and '.join(checked.tools)}", style="bold")
    show_plan(console, plan, commands=[], verdict=verdict)
    for title, lines in lists.items():
        bullets(console, title, lines)


def _head_changes(checked: Checked) -> str:
    return CHANGES + (", of what is described" if checked.undescribed else "")


def _show_short(
    console: Console,
    checked: Checked,
    plan: Plan,
    verdict: tuple[str, str, str] | None,
    lists: dict[str, Sequence[str]],
) -> None:
    """What is assumed is cut to what is left of the lines."""
    lines = describe_memory(console, plan, verdict)
    lines += describe_recipe(console, plan.recipe, read_as=" and ".join(checked.tools))
    if verdict is None and plan.memory.verdict != "does_not_fit":
        lines += describe_time(console, plan)
    assumed = [*lists.pop(OF_FILES, []), *plan.assumptions]
    lines += _fit(console, lists, MOST - 2 - len(lines))
    left = MOST - 1 - len(lines)
    lines += list_assumed(console, assumed, left if assumed else 0)
    write_lines(console, lines, WHOLE)


def _fit(console: Console, lists: Mapping[str, Sequence[str]], most: int) -> Lines:
    """The first rows of each list, as many of each as `most` lines hold."""
    lines: Lines = []
    for few, each in ((FEW, 2), (FEW, 1), (2, 2), (2, 1), (1, 1)):
        lines = []
        for title, rows in lists.items():
            if rows:
                more = f" (the first {few} of {len(rows)})" if len(rows) > few else ""
                lines += [(), *text(console, title + more, style="bold")]
            whole = 3 if title.startswith(CHANGES) else each  # what half a change says helps nobody
            for row in rows[:few]:
                lines += text(console, row, indent=INDENT, most=whole)
        if len(lines) <= most:
            break
    return lines


def _name(one: Undescribed) -> str:
    """The key with its value, why it is not described, and what may have been meant."""
    meant = f"; is `{one.near}` meant?" if one.near else ""
    return f"`{one.setting}` ({one.file}): {one.why}{meant}"


def _say(change: Change) -> str:
    """The keys as one would write them, and what comes of them."""
    several = len({one.file for one in change.edited}) > 1
    keys = [
        f"{one.key}: {_yaml(one.after)}" + (f" ({one.file})" if several else "")
        for one in change.edited
    ]
    time = "" if change.relative_time is None else f", step time x {change.relative_time:.2f}"
    taken = f"; assumed: {'; '.join(change.assumed)}" if change.assumed else ""
    return f"{', '.join(keys)} -> {show_bytes(change.needed)}{time}: {change.keeps}{taken}"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explain(found: Diagnosed) -> list[str]:
    """What of the prediction the message fits, then what the message says."""
    message = found.message
    lines = [f"{show_bytes(message.tried)} was asked of the device"]
    if found.other_device:
        lines.append("it is of a device of another size than the one asked about: `--device`")
    for one in found.suspects:
        shape = " x ".join(map(str, one.shape))
        lines.append(f"of that size: {one.what}, {shape} in {one.dtype}")
    if not found.suspects:
        lines.append("of that size: none of the step's large tensors, as memfit lists them")
    lines += [
        f"beyond the prediction, {one.what}: {show_bytes(one.nbytes)}" for one in found.causes
    ]
    if found.fragmented:
        lines.append(
            "torch held that much and could not use it: it was in pieces"
            " (PYTORCH_ALLOC_CONF=expandable_segments:True)"
        )
    if message.allocated is not None:
        phase = found.phase or "none: so much is in no phase of the prediction"
        lines.append(f"predicted to need so much first: {phase}")
    for name in ("capacity", "free", "allocated", "reserved", "outside"):
        value = getattr(message, name)
        if value is not None:
            lines.append(f"{MEANS[name]}: {show_bytes(value)}")
    return lines
