"""The whole screen of a certificate: numbers, predicted against certified, every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.core import units
from memfit.core.wording import PHASES, VERDICTS, set_words, show_error
from memfit.plan.memory.verdict import describe_shortfall, needs
from memfit.records.ledger import Ledger, Phase, sum_by_kind
from memfit.records.results import Certificate, Lever, Nearest, Plan
from memfit.report.join import signed_error
from memfit.screens.widgets.layout import (
    INDENT,
    bullets,
    heading,
    make_table,
    next_commands,
    plain,
    say,
    show,
)
from memfit.screens.widgets.memory import show_bar, show_breakdown, show_verdict
from memfit.screens.widgets.tensors import NOWHERE, each
from memfit.screens.widgets.terminal import Console

BEYOND_ALLOCATED = ("cached", "context")  # owners of what no tensor's block holds
CHANGES = "*"  # the mark of a lever that changes what is learned


def show_certificate(
    console: Console,
    certificate: Certificate,
    plan: Plan | None,
    *,
    commands: Sequence[str],
    levers: Sequence[Lever] | None = None,
    nearest: Nearest | None = None,
) -> None:
    """The whole of it, as `memfit certify --why` prints it; `plan` adds the predicted column.

    levers: None, where none was certified.
    """
    recipe, memory = certificate.recipe, certificate.memory
    show_verdict(console, memory, f"{recipe.model.name} on {recipe.placed_on} (certified)")
    say(console, f"recipe {certificate.recipe_digest}: {describe_run(certificate)}", style="dim")
    show_bar(console, memory)
    show_breakdown(console, memory)
    _show_numbers(console, certificate, plan)
    _show_phases(console, certificate, plan)
    if certificate.host:
        held = (f"{PHASES.get(p, p)} {units.show_bytes(n)}" for p, n in certificate.host.items())
        say(console, f"host tensors meanwhile: {', '.join(held)}", indent=INDENT)
    _show_generation(console, certificate)
    if plan is not None:
        _show_kinds(console, certificate, plan)
    _show_every_tensor(console, certificate)
    if levers is not None:
        show_levers(console, levers)
    if memory.verdict == "does_not_fit":
        show_nearest(console, nearest, recipe.device, planned=plan is not None)
    bullets(console, "Holds for", certificate.bounds)
    next_commands(console, commands)


def describe_run(certificate: Certificate) -> str:
    """How the certificate was made, and by which torch."""
    torch = certificate.versions.get("torch", "an unknown version")
    took = units.show_seconds(certificate.seconds)
    if certificate.from_cache:
        ran = f"from the cache, made in {took}; `--no-cache` runs its step again"
    else:
        ran = f"its own step ran on fake tensors in {took}"
    return f"{ran}, torch {torch}"


def _bytes(n: int | None) -> str:
    return "unknown" if n is None else units.show_bytes(n)


def _compare(
    console: Console, title: str, rows: Iterable[tuple[str, int | None, int | None, str]]
) -> None:
    """(name, predicted, certified, note) with the signed error between."""
    heading(console, title)
    numbers = ("predicted", "certified", "error")
    table = make_table("", *numbers, "", numbers=numbers)
    for name, predicted, certified, note in rows:
        error = show_error(signed_error(predicted, certified))
        table.add_row(name, _bytes(predicted), _bytes(certified), error, plain(console, note))
    show(console, table)


def _show_numbers(console: Console, certificate: Certificate, plan: Plan | None) -> None:
    found, predicted = certificate.memory, plan.memory if plan else None
    meaning = {
        "peak_allocated": "live tensors, or the allocator's blocks",
        "peak_reserved": "what the caching allocator holds",
        "device_total": "with the context: what the driver shows",
    }
    rows = [
        (name, getattr(predicted, name) if predicted else None, getattr(found, name), what)
        for name, what in meaning.items()
        if getattr(found, name) is not None or (predicted and getattr(predicted, name) is not None)
    ]
    _compare(console, "The memory numbers", rows)


def _show_phases(console: Console, certificate: Certificate, plan: Plan | None) -> None:
    predicted = totals(plan.ledger) if plan else {}
    peak = certificate.memory.peak_phase
    rows = [
        (PHASES.get(phase, phase), predicted.get(phase), n, "<- peak" if phase == peak else "")
        for phase, n in certificate.phases.items()
    ]
    _compare(console, "By instant", rows)


def _show_generation(console: Console, certificate: Certificate) -> None:
    """A verdict of its own: `memfit generate` is another process, after the run."""
    made = certificate.generation
    if made is None:
        return
    heading(console, "Generating, in a process of its own")
    line = f"{VERDICTS[made.verdict]}: needs {units.show_bytes(needs(made))}; {made.because}"
    say(console, line, indent=INDENT)


def totals(ledger: Ledger) -> dict[str, int]:
    """Peak bytes of each phase that a ledger holds."""
    return {str(p): ledger.total(p) for p in ledger.phases}


def _show_kinds(console: Console, certificate: Certificate, plan: Plan) -> None:
    """Both at the certified peak's phase and up to what is allocated: like beside like."""
    phase = Phase(certificate.memory.peak_phase)
    allocated = (e for e in certificate.memory.entries if e.owner not in BEYOND_ALLOCATED)
    predicted, certified = plan.ledger.by_kind(phase), sum_by_kind(allocated)
    kinds = [k for k in predicted | certified]
    rows = [(str(k), predicted.get(k, 0), certified.get(k, 0), "") for k in kinds]
    _compare(console, f"By kind at the peak ({PHASES.get(phase, phase)})", rows)


def _show_every_tensor(console: Console, certificate: Certificate) -> None:
    """Two lines a row: what it is, and where it comes from."""
    rows = certificate.at_peak
    count = sum(row.count for row in rows)
    heading(console, f"All {count:,} tensors alive at the peak")
    width = max((len(each(row)) for row in rows), default=0)
    for row in rows:
        what = f"{each(row):>{width}}  {row.kind}  {row.module or NOWHERE}"
        say(console, what, indent=INDENT)
        shape = f"{row.dtype} ({', '.join(map(str, row.shape))})" if row.dtype else ""
        origin = "  ".join(filter(None, (row.op, shape, row.source)))
        say(console, origin, style="dim", indent=INDENT + width + 2)


def show_levers(console: Console, levers: Sequence[Lever]) -> None:
    """What each certified lever takes off the peak."""
    heading(console, "Levers (one knob turned, each certified)")
    if not levers:
        say(console, "no knob can be turned", indent=INDENT)
        return
    numbers = ("removes", "new peak")
    table = make_table("--set", *numbers, "verdict", numbers=numbers)
    table.columns[0].no_wrap = True
    for lever in levers:
        mark = "" if lever.exact else f" {CHANGES}"
        table.add_row(
            "\n".join(set_words(lever.changes)) + mark,
            "unknown" if lever.removed is None else _signed(lever.removed),
            "unknown" if lever.peak_allocated is None else _bytes(lever.peak_allocated),
            VERDICTS[lever.verdict] if lever.verdict else "NOT CERTIFIED",
        )
    show(console, table)
    if not all(lever.exact for lever in levers):
        say(console, f"{CHANGES} changes what is learned", style="dim", indent=INDENT)
    for lever in levers:
        if lever.verdict is None:
            line = f"{' '.join(set_words(lever.changes))}: {lever.because}"
            say(console, line, style="dim", indent=INDENT)


def _signed(removed: int) -> str:
    """Bytes taken off the peak; a minus where it grows."""
    return ("-" if removed < 0 else "") + units.show_bytes(abs(removed))


NEAREST = {
    "fits": "The nearest recipe that fits",
    "at_risk": "None found surely fits; the nearest that may",
    "unproven": "None found surely fits; the nearest that may",
    "does_not_fit": "No recipe found fits; the smallest found",
}


def show_nearest(
    console: Console, nearest: Nearest | None, device: str, *, planned: bool = True
) -> None:
    """What to set so that it fits; or how near the smallest recipe comes.

    planned: whether there was a plan to search from.
    """
    if nearest is None:
        heading(console, "The nearest recipe that fits")
        why = "the limit is unknown, or no other can be certified"
        if not planned:
            why = "no plan describes this request; --levers certifies every lever"
        say(console, f"not searched: {why}", indent=INDENT)
        return
    fits = nearest.memory.verdict != "does_not_fit"
    title = NEAREST[nearest.memory.verdict]
    heading(console, f"{title} (certified, recipe {nearest.recipe_digest})")
    for word in set_words(nearest.changes) or ["(as it was asked)"]:
        say(console, f"--set {word}" if nearest.changes else word, indent=INDENT)
    parts = [
        describe_shortfall(nearest.memory, device)
        if not fits
        else f"needs {units.show_bytes(needs(nearest.memory))} "
        f"of {_bytes(nearest.memory.usable)} usable",
        f"{nearest.relative_time - 1:+.1%} time a step (predicted)",
        "learns the same" if nearest.exact else "changes what is learned",
    ]
    say(console, "; ".join(parts), indent=INDENT)
