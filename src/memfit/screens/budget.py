"""The screen of a budget: every figure with where it comes from; what is unknown says why."""

from __future__ import annotations

from memfit.core import units
from memfit.plan.budget.budget import QUANTITIES, Budget, Figure
from memfit.plan.budget.lifetime import Lifetime
from memfit.screens.widgets.layout import INDENT, bullets, heading, make_table, plain, say, show
from memfit.screens.widgets.terminal import Console

COUNTS = {"parameters", "tokens", "chinchilla_tokens", "chinchilla_parameters",
          "optimal_parameters", "optimal_tokens"}  # fmt: skip


def show_budget(console: Console, budget: Budget) -> None:
    """Print the quantities stated and solved, then what follows from them, then the warnings."""
    known = [str(n) for n in QUANTITIES]
    own = {n: f for n, f in budget.figures.items() if n in known}
    rest = {n: f for n, f in budget.figures.items() if n not in known}
    _show_figures(console, "Budget", own)
    _show_figures(console, "Which means", rest)
    if (sized := budget.inference) is not None:
        heading(console, "Inference")
        table = make_table("", "")
        table.show_header = False
        table.add_row("largest that fits", f"{units.show_count(sized.largest)} parameters")
        table.add_row("because", plain(console, sized.because))
        table.add_row("in the catalogue", f"{sized.model}: {units.show_count(sized.parameters)}")
        table.add_row("its weights", units.show_bytes(sized.weight_nbytes))
        table.add_row("its cache", units.show_bytes(sized.cache_nbytes))
        show(console, table)
    if budget.lifetime is not None:
        _show_life(console, budget.lifetime)
    bullets(console, "Mind", budget.warnings)


def _show_life(console: Console, life: Lifetime) -> None:
    """What was budgeted beside the cheapest of its quality."""
    heading(console, f"Over its life: {units.show_count(life.request.tokens)} tokens served")
    names = ("parameters", "tokens", "train USD", "serve USD", "a token")
    table = make_table("", *names, numbers=names)
    for name, size in (("as budgeted", life.own), ("cheapest", life.cheapest)):
        table.add_row(
            name,
            units.show_count(size.parameters),
            units.show_count(size.tokens),
            _rounded(size.training),
            _rounded(size.serving),
            units.show_seconds(size.latency) + ("" if size.fits else "!"),
        )
    show(console, table)
    if not life.own.fits:
        why = "! it cannot be served there: its memory or its latency is too much"
        say(console, why, style="dim", indent=INDENT)
    bullets(console, "Because", [plain(console, text) for text in life.because])


def _rounded(usd: float) -> str:
    """To three digits: serving is known no better."""
    return f"{float(f'{usd:.3g}'):,.0f}"


def _show_figures(console: Console, title: str, figures: dict[str, Figure]) -> None:
    heading(console, title)
    table = make_table("", "value", "because", numbers=("value",))
    for name, figure in figures.items():
        shown = show_figure(name, figure)
        table.add_row(
            name.replace("_", " "),
            shown,
            plain(console, figure.because),
            style="bold" if figure.because == "given" else "",
        )
    show(console, table)


def show_figure(name: str, figure: Figure) -> str:
    """The value in the units that people use."""
    value, unit = figure.value, figure.unit
    if value is None:
        return "unknown"
    if name in COUNTS:
        return units.show_count(value)
    if unit == "s":
        return units.show_seconds(value)
    if unit == "FLOP/s":
        return units.show_flops(value)
    if unit == "USD":
        return f"{value:,.0f} USD"
    if unit == "h":
        return f"{value:,.0f} h" if value >= 10 else f"{value:.3g} h"
    if unit == "" and value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g} {unit}".rstrip()
