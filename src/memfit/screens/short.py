"""The short screen of `memfit plan`, `predict` and `check`: 24 lines of 80 columns at most.

Verdict, bar, recipe, time and money, three levers or three ways out, what was assumed, what to type
next. `--why` shows the whole of it (`memfit.screens.plan`, `memfit.screens.check`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memfit.core import units
from memfit.core.wording import VERDICTS
from memfit.files.flags import type_key
from memfit.plan.questions.replanned import INEXACT
from memfit.plan.questions.shown_levers import FEW as FEW
from memfit.plan.questions.shown_levers import MATTERS, choose_levers, is_inexact, needs
from memfit.plan.request.assumed import describe_storage, is_pure
from memfit.records.recipe import Parallel, Recipe
from memfit.records.results import Certificate, Plan, WayOut
from memfit.screens.widgets.bar import fill, scale, stacked_bar
from memfit.screens.widgets.layout import INDENT, STYLES, continue_lines, plain
from memfit.screens.widgets.memory import describe_needed, parts_of
from memfit.screens.widgets.phases import describe_longest
from memfit.screens.widgets.terminal import Console, Line, Styled, wrap

MOST = 24  # lines
KINDS = 4  # that the line below the bar names
WIDEST_NAME = 40  # of a lever, beside which its figures stand
MANY = 1000  # steps whose time is shown where their number is unknown
OTHERWISE = f"* {INEXACT}"
WHOLE = "--why explains each figure and lists everything considered and assumed"
Lines = list[Line]


def show_short(console: Console, plan: Plan, *, commands: Sequence[str]) -> None:
    """Print the screen; what was assumed is cut to what is left of 24 lines."""
    wide = 0 if plan.ways_out else 1
    above = [
        *describe_memory(console, plan),
        *describe_recipe(console, plan.recipe, most=2 + wide),
        *_warn_storage(console, plan, 1 + wide),
    ]
    if not plan.ways_out:  # each has a time of its own
        above += describe_time(console, plan)
    below = list_next(console, commands)
    left = MOST - len(above) - len(below) - 1
    for few in range(FEW, 0, -1):
        levers = _list_levers(console, plan, few)
        if len(levers) + 1 <= left:
            above += levers
            left -= len(levers)
            break
    assumed = list_assumed(console, plan.assumptions, max(left, 1))
    write_lines(console, [*above, *assumed, *below], WHOLE)


def write_lines(console: Console, lines: Lines, whole: str) -> None:
    """Print a screen, and what shows the whole of it."""
    for line in (*lines, *text(console, whole, style="dim")):
        console.write(line)


def text(console: Console, words: str, *, style: str = "", indent: int = 0, most: int = 0) -> Lines:
    """Wrap text into lines; most: of their number, with an ellipsis where that cuts it."""
    lines = wrap(plain(console, words), console.width - indent)
    if most and len(lines) > most:
        shown = wrap(" ".join(lines[:most]), console.width - indent - 2)[:most]
        lines = [*shown[:-1], shown[-1] + " …" if not console.ascii_only else shown[-1] + " .."]
    return [[Styled(" " * indent), Styled(line, style)] for line in lines]


def describe_memory(
    console: Console,
    found: Plan | Certificate,
    verdict: tuple[str, str, str] | None = None,
    note: str = "",
) -> Lines:
    """The verdict with margin and range, the bar, and its largest parts.

    verdict: another one than the memory's own: its word, style and sentence; note: after the
    model's and the device's name.
    """
    memory, recipe = found.memory, found.recipe
    subject = f"{recipe.model.name} on {recipe.placed_on}{note}"
    if memory.peak_allocated is None:
        return [
            *text(console, f"memory unknown: {subject}", style="bold"),
            *text(console, memory.because, indent=INDENT, most=4),
        ]
    own = VERDICTS[memory.verdict], STYLES[memory.verdict], describe_needed(memory)
    word, style, sentence = verdict or own
    lines: Lines = [[Styled(word, style), Styled(f"  {plain(console, subject)}")]]
    lines += text(console, sentence, most=3)
    parts, width = parts_of(memory), console.width - 2 * INDENT
    margin = Styled(" " * INDENT)
    bar = stacked_bar(parts, line=memory.usable, width=width, ascii_only=console.ascii_only)
    lines += [(), [margin, *bar]]
    lines += [[margin, *scale(sum(n for _, n in parts), memory.usable, width=width)]]
    largest = sorted(parts, key=lambda part: -part[1])[:KINDS]
    key: list[Styled] = [margin]
    for kind, nbytes in largest:
        character, colour = fill(kind, ascii_only=console.ascii_only)
        label = f" {kind} {units.show_gib(nbytes, digits=1).removesuffix(' GiB')}  "
        if sum(len(piece.text) for piece in key) + len(label) + 4 <= console.width:
            key += [Styled(character, colour), Styled(label)]
    return [*lines, [*key, Styled("GiB", "dim")]]


def describe_recipe(console: Console, r: Recipe, *, most: int = 3, read_as: str = "") -> Lines:
    """Whose step it is, and its recipe; read_as: the tools whose files say so."""
    whose = "memfit's own step" if r.is_own else f"a step of {r.framework}"
    whose = f"read as {read_as}: {whose}" if read_as else whose
    names = r.lora.targets
    targets = ",".join(names) if len(names) < 3 else f"{len(names)} projections a block"
    method: str = r.method
    if r.adapted:
        method += f" r={r.lora.rank} on {targets}, base in {r.base_format}"
    objective = "" if r.objective == "pretrain" else f"{r.objective}, "
    redo = f"{r.recompute_blocks} blocks recomputed" if r.recompute_blocks else "nothing recomputed"
    redo += f", {r.selective_blocks} selectively" if r.selective_blocks else ""
    offload = f", {r.offload} offloaded" if r.offload != "none" else ""
    return text(
        console,
        f"{whose}: {objective}{method}, {r.precision}, {r.optimizer.name}, sequence"
        f" {r.sequence_length}, batch {r.micro_batch} x {r.accumulation}{_describe_axes(r)},"
        f" {redo}{offload}",
        style="dim", most=most,
    )  # fmt: skip


def _warn_storage(console: Console, plan: Plan, most: int) -> Lines:
    """What pure 16-bit storage loses."""
    if not (plan.recipe.is_own and is_pure(plan.recipe)):
        return []
    words = describe_storage(plan.request, plan.recipe)
    return text(console, words, style="bold yellow", most=most)


def _describe_axes(recipe: Recipe) -> str:
    own, open_ = recipe.parallel, Parallel()
    if own.world == 1:
        return ""
    names = [n for n in own.__struct_fields__ if getattr(own, n) != getattr(open_, n)]
    return f" on {own.world} ranks ({', '.join(f'{n} {getattr(own, n)}' for n in names)})"


def describe_time(console: Console, plan: Plan) -> Lines:
    """Time and money with their range; what nobody knows says unknown."""
    time, cost, steps = plan.time, plan.cost, plan.recipe.steps
    if time.step_seconds is None:
        return text(console, f"time unknown: {time.because.removeprefix('unknown: ')}", most=2)
    low, high = time.step_seconds_low, time.step_seconds_high
    ranges = None if low is None or high is None else (low, high)

    def between(value: float, show: Callable[[float], str]) -> str:
        if ranges is None or not time.step_seconds:
            return ""
        ends = (value * end / time.step_seconds for end in ranges)
        return f" ({' to '.join(map(show, ends))})"

    rate = "" if time.tokens_per_second is None else f", {time.tokens_per_second:,.0f} tokens/s"
    used = "" if time.mfu is None else f", MFU {time.mfu:.0%}"
    step = units.show_seconds(time.step_seconds)
    step += f"{between(time.step_seconds, units.show_seconds)} a step{rate}{used}"
    parts = []
    if time.total_seconds is not None:
        whole = units.show_seconds(time.total_seconds)
        whole += between(time.total_seconds, units.show_seconds)
        parts.append(f"{steps:,} steps take {whole}" if steps else f"all steps take {whole}")
    if cost.usd is not None:
        parts.append(f"cost {cost.usd:,.2f} USD{between(cost.usd, lambda n: f'{n:,.2f}')}")
    elif time.total_seconds is not None:
        parts.append("cost unknown: no price is on record")
    else:
        seconds = time.step_seconds * MANY
        whole = units.show_seconds(seconds) + between(seconds, units.show_seconds)
        parts.append(f"{MANY:,} steps take {whole}; how many there are is unknown")
    if longest := describe_longest(time.phases):
        step += f"; {longest}"
    return [*text(console, step, most=2), *text(console, ", ".join(parts), most=2)]


def _list_levers(console: Console, plan: Plan, few: int) -> Lines:
    """As many ways out where it does not fit; else as many levers that matter."""
    if plan.ways_out:
        title = f"Ways out, each planned ({OTHERWISE})"
        rows = [_describe_way(way) for way in _choose_ways(plan.ways_out, few)]
    else:
        miss = plan.memory.verdict == "does_not_fit"
        title = f"Levers{' that would help' if miss else ''} ({OTHERWISE})"
        rows = _describe_levers(plan, few)
    if not rows:
        return []
    if not any("*" in row for row in rows):
        title = title.replace(f" ({OTHERWISE})", "")
    if any("~" in row for row in rows):
        title += "; ~ estimated"
    lines: Lines = [(), *text(console, title, style="bold")]
    return [*lines, *(line for row in rows for line in text(console, row, indent=INDENT, most=2))]


def _describe_levers(plan: Plan, few: int) -> list[str]:
    own, chosen = plan.memory.needed, choose_levers(plan.levers, plan)[:few]
    if own is None:
        return []
    names = [_type(row.changes) for row in chosen]
    width = min(max(map(len, names), default=0), WIDEST_NAME)
    lines = []
    for row, name in zip(chosen, names, strict=True):
        saved = needs(row) - own
        about = "" if row.exact else "~"
        nbytes = f"{about}{'+' if saved > 0 else '-'}{units.show_bytes(abs(saved))}"
        time = _compare_time(row.relative_time) if plan.time.step_seconds else "time unknown"
        mark = "*" if is_inexact(row) else " "
        fits = f", on {row.mesh}" if row.mesh else ""
        fits += "" if row.fits else ", does not fit"
        lines.append(f"{name.ljust(width)} {mark} {nbytes.rjust(11)}, {time}{fits}")
    return lines


def _compare_time(relative: float) -> str:
    change = relative - 1
    return "as fast" if abs(change) < MATTERS / 10 else f"{change:+.1%} time"


def _type(changes: Mapping[str, Any]) -> str:
    return " ".join(shlex.join(type_key(key, value)) for key, value in changes.items())


def _choose_ways(ways: Sequence[WayOut], few: int) -> list[WayOut]:
    """The cheapest of each kind first: fewer bits, other devices, more of them."""
    first = list({way.kind: way for way in reversed(ways)}.values())
    order = [*(w for w in ways if w in first), *(w for w in ways if w not in first)][:few]
    return [way for way in ways if way in order]


def _describe_way(way: WayOut) -> str:
    needs = way.peak_allocated if way.device_total is None else way.device_total
    time = "" if way.total_seconds is None else f", {units.show_seconds(way.total_seconds)}"
    usd = "" if way.usd is None else f", {way.usd:,.2f} USD"
    mark = "" if way.exact else " *"
    return f"{_type(way.changes)}{mark}: {way.title}, {units.show_gib(needs)}{time}{usd}"


def list_assumed(console: Console, assumed: Sequence[str], most: int) -> Lines:
    """What is taken for granted, in `most` lines at most."""
    if not assumed:
        return []
    return text(console, f"Assumed: {'; '.join(assumed)}", style="dim", most=most)


def list_next(console: Console, commands: Sequence[str]) -> Lines:
    """The first command to type next."""
    if not commands:
        return []
    lines = continue_lines(commands[0], console.width - INDENT)
    shown: Lines = [[Styled(" " * INDENT + plain(console, line), "cyan")] for line in lines]
    return [(), [Styled("Next", "bold")], *shown]
