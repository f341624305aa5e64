"""What `memfit check` read, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.core.units import show_bytes
from memfit.core.wording import VERDICTS
from memfit.screens.plan import show_plan
from memfit.screens.widgets.layout import STYLES, bullets, say
from memfit.screens.widgets.terminal import Console

# of verdicts that have a sentence of their own
WORDS = {
    name: (VERDICTS[name], STYLES[name]) for name in ("does_not_fit",)
} | {"not_known": ("NOT KNOWN", "bold yellow")}  # fmt: skip
MEANS = {
    "capacity": "the device has", "free": "free of it", "allocated": "in torch's tensors",
    "reserved": "held by torch", "outside": "held by others than torch's allocator",
}  # fmt: skip

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
    """The verdict and its breakdown as of any plan; what would fit; how the files were read."""
    say(console, f"Read as {' and '.join(checked.tools)}", style="bold")
    verdict = (*WORDS[answer.verdict], answer.headline) if answer.headline else None
    show_plan(console, plan, commands=[], why=why, verdict=verdict)
    bullets(console, "Not described", [_name(one) for one in checked.undescribed])
    if plan.memory.verdict != "fits":
        none = ["none of the keys that memfit knows"]
        heads = "Smallest changes that fit" + (
            ", of what is described" if checked.undescribed else ""
        )
        bullets(console, heads, [_say(one) for one in smallest] or none)
    bullets(console, "Assumed of the files", checked.assumed)
    if found is not None:
        bullets(console, "The out-of-memory message", _explain(found))


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
    """What the message says, and what of the prediction it fits."""
    message = found.message
    lines = [f"{show_bytes(message.tried)} was asked of the device"]
    for name in ("capacity", "free", "allocated", "reserved", "outside"):
        value = getattr(message, name)
        if value is not None:
            lines.append(f"{MEANS[name]}: {show_bytes(value)}")
    if found.causes:
        ranked = (f"{one.what}: {show_bytes(one.nbytes)}" for one in found.causes)
        lines += [f"beyond the prediction, {one}" for one in ranked]
    if found.other_device:
        lines.append("it is of a device of another size than the one asked about: `--device`")
    if found.fragmented:
        lines.append(
            "torch held that much and could not use it: it was in pieces"
            " (PYTORCH_ALLOC_CONF=expandable_segments:True)"
        )
    for one in found.suspects:
        shape = " x ".join(map(str, one.shape))
        lines.append(f"of that size: {one.what}, {shape} in {one.dtype}")
    if not found.suspects:
        lines.append("of that size: none of the step's large tensors, as memfit lists them")
    if message.allocated is not None:
        phase = found.phase or "none: so much is in no phase of the prediction"
        lines.append(f"predicted to need so much first: {phase}")
    return lines
