"""The short screen of `memfit certify`: 24 lines of 80 columns at most.

Verdict, bar, recipe, predicted beside certified, the largest tensors of the peak, what the
certificate holds for, what to type next. `--why` shows the whole of it
(`memfit.screens.certificate`); levers and the nearest recipe that fits stand below it.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core import units
from memfit.core.wording import PHASES, VERDICTS, show_error
from memfit.plan.memory.verdict import needs
from memfit.records.results import Certificate, Lever, Memory, Nearest, Plan
from memfit.report.join import signed_error
from memfit.screens.certificate import describe_run, show_levers, show_nearest
from memfit.screens.short import (
    FEW,
    MOST,
    Lines,
    describe_memory,
    describe_recipe,
    list_next,
    text,
    write_lines,
)
from memfit.screens.widgets.layout import INDENT, next_commands
from memfit.screens.widgets.tensors import NOWHERE, each
from memfit.screens.widgets.terminal import Console

WHOLE = "--why lists every phase and tensor; --levers certifies what would change it"


def show_short_certificate(
    console: Console,
    certificate: Certificate,
    plan: Plan | None,
    *,
    commands: Sequence[str],
    levers: Sequence[Lever] | None = None,
    nearest: Nearest | None = None,
) -> None:
    """Print the screen; plan: what was predicted, None where nothing was."""
    memory = certificate.memory
    miss = memory.verdict == "does_not_fit"
    continued = miss or levers is not None  # what to type next stands below all of it
    below = [] if continued else list_next(console, commands)
    lines = describe_memory(console, certificate, note=" (certified)")
    lines += describe_recipe(console, certificate.recipe)
    ran = f"recipe {certificate.recipe_digest}: {describe_run(certificate)}"
    lines += text(console, ran, style="dim", most=2)
    lines += _compare(console, memory, plan)
    lines += _describe_generation(console, certificate)
    left = MOST - 1 - len(lines) - len(below)
    lines += _list_tensors(console, certificate, min(left - 2, FEW))  # a line for the bounds
    bounds = f"Holds for: {'; '.join(certificate.bounds)}" if certificate.bounds else ""
    left = MOST - 1 - len(lines) - len(below)
    lines += text(console, bounds, style="dim", most=max(left, 1)) if bounds else []
    write_lines(console, [*lines, *below], WHOLE)
    if levers is not None:
        show_levers(console, levers)
    if miss:
        show_nearest(console, nearest, certificate.recipe.device, planned=plan is not None)
    if continued:
        next_commands(console, commands)


def _compare(console: Console, memory: Memory, plan: Plan | None) -> Lines:
    """Each number, and what was predicted of it."""
    lines: Lines = []
    for name in ("peak_allocated", "peak_reserved"):
        found = getattr(memory, name)
        predicted = getattr(plan.memory, name) if plan else None
        if found is None:
            continue
        line = f"{name} {units.show_bytes(found)}"
        if predicted is not None:
            error = show_error(signed_error(predicted, found))
            line += f", predicted {units.show_bytes(predicted)} (error {error})"
        lines += text(console, line, most=1)
    return lines


def _describe_generation(console: Console, certificate: Certificate) -> Lines:
    """A verdict of its own: `memfit generate` is another process, after the run."""
    made = certificate.generation
    if made is None:
        return []
    line = f"memfit generate, after the run: {VERDICTS[made.verdict]}, needs "
    return text(console, line + units.show_bytes(needs(made)), most=1)


def _list_tensors(console: Console, certificate: Certificate, most: int) -> Lines:
    """The largest tensors that are alive at the peak, at most `most`, a line each."""
    rows = certificate.at_peak[: max(most, 0)]
    if not rows:
        return []
    phase = certificate.memory.peak_phase
    title = f"Largest tensors at the peak ({PHASES.get(phase, phase)})"
    width = max(len(each(row)) for row in rows)
    lines = [*text(console, title, style="bold", most=1)]
    for row in rows:
        module = row.module.removeprefix("base_model.model.") or NOWHERE
        what = f"{each(row):>{width}}  {row.kind}  {module}"
        lines += text(console, what, indent=INDENT, most=1)
    return lines
