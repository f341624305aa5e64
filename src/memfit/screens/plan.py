"""The first screen: does it fit, what takes the memory, what else was considered, what next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from memfit.core import units
from memfit.core.wording import set_words
from memfit.objectives import find_objective
from memfit.plan.memory.verdict import describe_shortfall, needs
from memfit.plan.request.assumed import describe_storage, is_pure
from memfit.plan.step_time.communication.traffic import compare_with_copies
from memfit.records.recipe import Parallel, Recipe
from memfit.records.results import Considered, Cost, Plan, Time
from memfit.screens.widgets.layout import (
    INDENT,
    WIDE,
    bullets,
    heading,
    make_table,
    next_commands,
    plain,
    say,
    show,
    tick,
)
from memfit.screens.widgets.memory import (
    show_bar,
    show_breakdown,
    show_instants,
    show_verdict,
    show_word,
)
from memfit.screens.widgets.phases import show_phases
from memfit.screens.widgets.terminal import Console


def show_plan(
    console: Console,
    plan: Plan,
    *,
    commands: Sequence[str],
    verdict: tuple[str, str, str] | None = None,
) -> None:
    """The whole of it, as `memfit plan --why` and `memfit predict --why` print it.

    verdict: another one than the prediction's own: its word, style and sentence.
    """
    recipe, memory = plan.recipe, plan.memory
    subject = f"{recipe.model.name} on {recipe.placed_on}"
    if memory.peak_allocated is None:
        say(console, f"memory unknown: {subject}")
        say(console, describe_recipe(plan), style="dim")
        say(console, memory.because, indent=INDENT)
    else:
        if verdict is None:
            show_verdict(console, memory, subject)
        else:
            word, style, sentence = verdict
            show_word(console, word, style, subject)
            say(console, sentence)
        say(console, describe_recipe(plan), style="dim")
        if recipe.is_own and is_pure(recipe):
            say(console, describe_storage(plan.request, recipe), style="bold yellow")
        _show_memory(console, plan)
    show_ways_out(console, plan)
    _show_time(console, plan.time, plan.cost, recipe.steps)
    _show_traffic(console, plan)
    _show_considered(console, plan)
    _show_levers(console, plan)
    bullets(console, "Assumed", plan.assumptions)
    next_commands(console, commands)


def _show_memory(console: Console, plan: Plan) -> None:
    recipe, memory = plan.recipe, plan.memory
    if memory.verdict == "does_not_fit":
        say(console, f"nearest miss: {describe_shortfall(memory, recipe.device)}")
    show_bar(console, memory)
    show_breakdown(console, memory)
    say(console, f"limit: {memory.because}", style="dim", indent=INDENT)
    show_instants(console, {p: plan.ledger.total(p) for p in plan.ledger.phases}, memory.peak_phase)


def describe_recipe(plan: Plan) -> str:
    """The recipe in one line."""
    r = plan.recipe
    stable = " (rank-stabilised)" if r.lora.scaling != "plain" else ""
    adapter = f" r={r.lora.rank}{stable} on {','.join(r.lora.targets)}" if r.adapted else ""
    whose = "" if r.is_own else f"a step of {r.framework}: "
    kind = " (selective)" if r.recompute == "selective" else ""
    part = f" + {r.selective_blocks} selective" if r.selective_blocks else ""
    part += f", {r.offload} offloaded" if r.offload != "none" else ""
    rounded = " with stochastic rounding" if r.optimizer.stochastic_rounding else ""
    within = " in backward" if r.optimizer.in_backward else ""
    return (
        f"{whose}{_describe_objective(r)}{r.method}{adapter}, {r.precision}{rounded},"
        f" {r.optimizer.name} {r.optimizer.implementation}{within},"
        f" sequence {r.sequence_length}, batch {r.micro_batch} x"
        f" {r.accumulation}{_describe_axes(r)}, recompute {r.recompute_blocks} blocks{kind}{part},"
        f" loss {r.loss}, attention {r.attention}, {r.steps or 'unknown'} steps; recipe"
        f" {plan.recipe_digest}"
    )


def _describe_objective(recipe: Recipe) -> str:
    """What is learned, where it is not every token."""
    preference = recipe.preference
    if recipe.compares and not recipe.scores:
        usual = find_objective(recipe.objective).usual_loss
        kind = "" if preference.loss_type == usual else f"{preference.loss_type}, "
        return (
            f"{recipe.objective} ({kind}beta {preference.beta:g},"
            f" reference {preference.reference}), "
        )
    return "" if recipe.objective == "pretrain" else f"{recipe.objective}, "


def _describe_axes(recipe: Recipe) -> str:
    """` x 8 ranks (dp_shard 4, tp 2)`; nothing for one device."""
    parallel, plain = recipe.parallel, Parallel()
    if parallel.world == 1:
        return ""
    names = [n for n in parallel.__struct_fields__ if getattr(parallel, n) != getattr(plain, n)]
    axes = ", ".join(f"{name} {getattr(parallel, name)}" for name in names)
    return f" on {parallel.world} ranks ({axes})"


def _show_traffic(console: Console, plan: Plan) -> None:
    """Bytes that a rank sends in a step, by axis; nothing of one device."""
    if not plan.traffic:
        return
    heading(console, "Sent by a rank in one step")
    columns = ("axis", "collective", "ranks", "bytes", "because")
    table = make_table(*columns, numbers=("ranks", "bytes"))
    for row in plan.traffic:
        sent = units.show_bytes(row.nbytes)
        table.add_row(row.axis, row.collective, str(row.ranks), sent, plain(console, row.because))
    show(console, table)
    ratio = compare_with_copies(plan.traffic)
    if ratio is not None:
        line = f"dp axes together: {ratio:.2f}x what DDP's all_reduce of the same gradients sends"
        say(console, line, style="dim", indent=INDENT)


def _known(value: float | None, text: str) -> str:
    return "unknown" if value is None else text


def _one_step(time: Time) -> str:
    seconds = _known(time.step_seconds, units.show_seconds(time.step_seconds or 0))
    if time.step_seconds_low is None or time.step_seconds_high is None:
        return seconds
    low, high = (units.show_seconds(s) for s in (time.step_seconds_low, time.step_seconds_high))
    return f"{seconds} (from {low} to {high})"


def time_rows(time: Time, cost: Cost, steps: int) -> list[tuple[str, str]]:
    """(what, figure) of time and cost; what nobody knows says unknown."""
    usd, kwh, kg = cost.usd, cost.kwh, cost.kg_co2
    energy = _known(kwh, f"{kwh or 0:,.3g} kWh") + (f", {kg:,.3g} kg CO2" if kg is not None else "")
    hours = cost.device_hours
    return [
        ("one step", _one_step(time)),
        ("tokens/s", _known(time.tokens_per_second, f"{time.tokens_per_second or 0:,.0f}")),
        ("MFU / HFU", _known(time.mfu, f"{time.mfu or 0:.1%} / {time.hfu or 0:.1%}")),
        ("model FLOP/step", f"{time.model_flops_per_step:.3g}"),
        (
            f"all {steps:,} steps" if steps else "all steps",
            _known(time.total_seconds, units.show_seconds(time.total_seconds or 0)),
        ),
        ("device-hours", _known(hours, f"{hours or 0:,.3g}")),
        ("cost", f"{_known(usd, f'{usd or 0:,.2f} USD')}, {energy}"),
    ]


def _show_time(console: Console, time: Time, cost: Cost, steps: int) -> None:
    heading(console, "Time and cost (predicted)")
    if time.step_seconds is None and not time.model_flops_per_step:
        say(console, f"unknown: {time.because}", indent=INDENT)
        return
    table = make_table("", "")
    table.show_header = False
    for what, figure in time_rows(time, cost, steps):
        table.add_row(what, figure)
    line = (time.because, time.range_because, cost.because)
    table.add_row("because", plain(console, "; ".join(filter(None, line))), style="dim")
    show(console, table)
    show_phases(console, time.phases)


def _show_considered(console: Console, plan: Plan) -> None:
    if not plan.considered:
        return
    rows = plan.considered
    common, labels = split_labels([row.label for row in rows])
    heading(console, f"Considered (all: {common})" if common else "Considered")
    table = make_table("", "recipe", "needs", "time", "why", numbers=("needs", "time"))
    for row, label in zip(rows, labels, strict=True):
        table.add_row(
            _mark(console, row),
            plain(console, label),
            _shown_needs(row),
            f"{row.relative_time:.2f}x",
            plain(console, row.because),
            style="bold" if row.chosen else "",
        )
    show(console, table)
    if not all(row.exact for row in rows):
        note = (
            "~ the search's estimate, within a few per cent; what was chosen is predicted in full"
        )
        say(console, note, style="dim", indent=INDENT)


def _mark(console: Console, row: Considered) -> str:
    """A tick for the chosen recipe; a nearest miss gets none."""
    if not row.chosen:
        return ""
    return tick(console) if row.fits else ">"


def _note_ranking(console: Console, plan: Plan) -> None:
    if plan.time.step_seconds is None:
        note = "the device's speed is unknown: times are compared at nominal rates"
        say(console, note, style="dim", indent=INDENT)


def split_labels(labels: Sequence[str]) -> tuple[str, list[str]]:
    """What all labels share, once, and the rest of each; a lone label stays whole."""
    pieces = [label.split(", ") for label in labels]
    if len(labels) < 2:
        return "", list(labels)
    common = [p for p in pieces[0] if all(p in other for other in pieces)]
    rest = [", ".join(p for p in own if p not in common) for own in pieces]
    return ", ".join(common), rest


def _shown_needs(row: Considered) -> str:
    return ("" if row.exact else "~") + units.show_bytes(_needs(row))


def _needs(row: Considered) -> int:
    return row.peak_allocated if row.device_total is None else row.device_total


def show_ways_out(console: Console, plan: Plan, of: str = "") -> None:
    """What would make it fit, each as it is typed after the command; nothing where it fits."""
    if not plan.ways_out:
        return
    heading(console, f"Ways out{of} (each planned, each fits; the cheapest first)")
    table = make_table("add", "needs", "all steps", "USD", "what it is", numbers=("needs", "USD"))
    table.columns[0].no_wrap = True
    for way in plan.ways_out:
        pairs = [shlex.join(way.options[n : n + 2]) for n in range(0, len(way.options), 2)]
        needs = way.peak_allocated if way.device_total is None else way.device_total
        other = "" if way.exact else "; changes what is learned"
        table.add_row(
            "\n".join(pairs),
            units.show_bytes(needs),
            _known(way.total_seconds, units.show_seconds(way.total_seconds or 0)),
            _known(way.usd, f"{way.usd or 0:,.2f}"),
            plain(console, f"{way.title}: {way.label}{other}"),
        )
    show(console, table)


def _show_levers(console: Console, plan: Plan) -> None:
    if not plan.levers:
        return
    miss = plan.memory.verdict == "does_not_fit"
    heading(console, "Levers that would help" if miss else "Levers (one knob set, planned again)")
    table = make_table("--set", "memory", "time", "fits", "note", numbers=("memory", "time"))
    table.columns[0].no_wrap = True
    own = needs(plan.memory)
    between = "\n" if console.width < WIDE else " "
    rows = sorted(plan.levers, key=_needs)
    for row in rows:
        saved = _needs(row) - own
        if miss and saved >= 0:
            continue
        on = f"on {row.mesh}" if row.mesh else ""
        table.add_row(
            between.join(set_words(row.changes)),
            ("" if row.exact else "~")
            + ("+" if saved > 0 else "-" if saved < 0 else "")
            + units.show_bytes(abs(saved)),
            f"{row.relative_time - 1:+.1%}",
            "yes" if row.fits else "no",
            plain(console, "; ".join(note for note in (row.because, on) if note)),
        )
    if not table.rows:
        say(console, "no single knob lowers the peak", indent=INDENT)
        return
    show(console, table)
    if not all(row.exact for row in rows):
        note = "~ estimated: bytes are reserved in proportion to the plan's, whose replay is long"
        say(console, note, style="dim", indent=INDENT)
    _note_ranking(console, plan)
