"""The screen of a certificate: verdict, three numbers, predicted against certified, the peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit import units
from memfit.ledger import Ledger
from memfit.report import signed_error
from memfit.results import Certificate, Plan
from memfit.screens.layout import bullets, heading, make_table, next_commands, plain, say, show
from memfit.screens.memory import show_bar, show_breakdown, show_verdict
from memfit.screens.terminal import Console
from memfit.words import PHASES, show_error

TENSORS = 10


def show_certificate(
    console: Console,
    certificate: Certificate,
    plan: Plan | None,
    *,
    commands: Sequence[str],
    why: bool = False,
) -> None:
    """The whole screen of `memfit certify`; `plan` adds the predicted column."""
    recipe, memory = certificate.recipe, certificate.memory
    show_verdict(console, memory, f"{recipe.model.name} on {recipe.device} (certified)")
    torch = certificate.versions.get("torch", "an unknown version")
    say(
        console,
        f"recipe {certificate.recipe_digest}: its own step ran on fake tensors in "
        f"{units.show_seconds(certificate.seconds)}, torch {torch}",
        style="dim",
    )
    show_bar(console, memory)
    show_breakdown(console, memory, why=why)
    _show_numbers(console, certificate, plan)
    _show_phases(console, certificate, plan)
    if plan is not None:
        _show_kinds(console, certificate, plan)
    _show_tensors(console, certificate)
    bullets(console, "Holds for", certificate.bounds)
    next_commands(console, commands)


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
    found, said = certificate.memory, plan.memory if plan else None
    meaning = {
        "peak_allocated": "live tensors, or the allocator's blocks",
        "peak_reserved": "what the caching allocator holds",
        "device_total": "with the context: what the driver shows",
    }
    rows = [
        (name, getattr(said, name) if said else None, getattr(found, name), what)
        for name, what in meaning.items()
        if getattr(found, name) is not None or (said and getattr(said, name) is not None)
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


def totals(ledger: Ledger) -> dict[str, int]:
    """Peak bytes of each phase that a ledger holds."""
    return {str(p): ledger.total(p) for p in ledger.phases}


def _show_kinds(console: Console, certificate: Certificate, plan: Plan) -> None:
    """Both ledgers at the certified peak's phase, so that like is compared with like."""
    phase = certificate.ledger.peak_phase
    predicted, certified = plan.ledger.by_kind(phase), certificate.ledger.by_kind(phase)
    kinds = [k for k in predicted | certified]
    rows = [(str(k), predicted.get(k, 0), certified.get(k, 0), "") for k in kinds]
    _compare(console, f"By kind at the peak ({PHASES.get(phase, phase)})", rows)


def _show_tensors(console: Console, certificate: Certificate) -> None:
    if not certificate.at_peak:
        return
    heading(console, "Largest tensors alive at the peak")
    table = make_table("bytes", "kind", "module", "made by", numbers=("bytes",))
    for t in certificate.at_peak[:TENSORS]:
        row = (t.kind, t.module or "(outside any module)", t.op)
        table.add_row(units.show_bytes(t.nbytes), *(plain(console, cell) for cell in row))
    show(console, table)
