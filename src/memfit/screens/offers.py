"""What money and time buy on each offer, and the two models that they train."""

from __future__ import annotations

from memfit.core import units
from memfit.plan.budget.offers import Answer, Near, Offers, Spent
from memfit.screens.widgets.layout import INDENT, bullets, heading, make_table, plain, say, show
from memfit.screens.widgets.terminal import Console


def show_offers(console: Console, offers: Offers) -> None:
    """A line an offer; then both answers of each, and where the figures come from."""
    request = offers.request
    limits = [f"{request.cost:,.0f} USD"] if request.cost is not None else []
    limits += [units.show_seconds(request.time)] if request.time is not None else []
    heading(console, f"What {' and '.join(limits)} buy")
    names = ("device-h", "time", "USD", "MFU", "FLOP")
    table = make_table("offer", *names, numbers=names)
    for row in offers.rows:
        table.add_row(_name(row), *_figures(row))
    show(console, table)
    say(console, "! is what ends first, time or money", style="dim", indent=INDENT)
    heading(console, "Which model, on how many tokens")
    table = make_table("offer", "", "parameters", "tokens", "nearest of the catalogue",
                       numbers=("parameters", "tokens"))  # fmt: skip
    for row in offers.rows:
        for what, answer in (("compute-optimal", row.optimal), ("inference-first", row.inference)):
            if answer is not None:
                table.add_row(_name(row) if what.startswith("c") else "", what, *_answer(answer))
        if row.model is not None:
            table.add_row("", "asked for", *_near(row.model))
    show(console, table)
    first = next((row for row in offers.rows if row.optimal and row.inference), None)
    reasons = []
    if first is not None and first.optimal is not None and first.inference is not None:
        reasons += [f"compute-optimal: {first.optimal.because}",
                 f"inference-first: {first.inference.because}"]  # fmt: skip
    reasons += [f"{_name(row)}: {'; '.join(row.because)}" for row in offers.rows]
    bullets(console, "Because", [plain(console, text) for text in reasons])


def _name(row: Spent) -> str:
    return row.offer.name


def _figures(row: Spent) -> tuple[str, ...]:
    def shown(value: float | None, text: str, binds: bool = False) -> str:
        return "unknown" if value is None else text + ("!" if binds else "")

    return (
        shown(row.device_hours, f"{row.device_hours or 0:,.0f}"),
        shown(row.time, units.show_seconds(row.time or 0), row.binds == "time"),
        shown(row.cost, f"{row.cost or 0:,.0f}", row.binds == "cost"),
        shown(row.mfu, f"{row.mfu or 0:.0%}"),
        shown(row.compute, f"{row.compute or 0:.3g}"),
    )


def _answer(answer: Answer) -> tuple[str, str, str]:
    nearest = answer.nearest[0].model if answer.nearest else "none fits"
    return units.show_count(answer.parameters), units.show_count(answer.tokens), nearest


def _near(near: Near) -> tuple[str, str, str]:
    fits = {True: "", False: " (does not fit)", None: " (memory unknown)"}[near.fits]
    return units.show_count(near.parameters), units.show_count(near.tokens), near.model + fits
