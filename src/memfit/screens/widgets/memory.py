"""What plan and certificate both show of memory: verdict, bar, breakdown by kind, instants."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.core import units
from memfit.core.wording import PHASES, VERDICTS
from memfit.plan.memory.verdict import needs
from memfit.records.ledger import Entry, Kind, sum_by_kind
from memfit.records.results import Memory
from memfit.screens.widgets.bar import Part, fill, scale, share_bar, stacked_bar
from memfit.screens.widgets.layout import (
    INDENT,
    STYLES,
    WIDE,
    heading,
    make_table,
    plain,
    say,
    show,
)
from memfit.screens.widgets.terminal import Console, Styled

FEW = 10
BEYOND = {
    "fragmentation": "reserved by the allocator beyond what is allocated",
    "context": "the device's context: kernels and libraries, outside the allocator",
}


def show_word(console: Console, word: str, style: str, subject: str) -> None:
    """A verdict's word, and what it is of."""
    show(console, [Styled(word, style), Styled(f"  {plain(console, subject)}")], indent=0)


def show_verdict(console: Console, memory: Memory, subject: str) -> None:
    """The word, both numbers, and how much room is left or missing."""
    show_word(console, VERDICTS[memory.verdict], STYLES[memory.verdict], subject)
    say(console, describe_needed(memory))


def describe_needed(memory: Memory) -> str:
    """What is needed with its range, of what, and how much is to spare or missing."""
    needed = needs(memory)
    line = f"needs {units.show_bytes(needed)}{_band(memory)}"
    if memory.usable is None:
        line += "; how much may be used is unknown"
    else:
        over = needed - memory.usable
        line += f" of {units.show_bytes(memory.usable)} usable"
        line += _ratio(needed, memory.usable)
        line += f": {units.show_bytes(abs(over))} {'too much' if over > 0 else 'to spare'}"
    return line


def _band(memory: Memory) -> str:
    if memory.total_low is None or memory.total_high is None:
        return ""
    low, high = units.show_gib(memory.total_low), units.show_gib(memory.total_high)
    return f" ({low} to {high})"


def _ratio(needed: int, usable: int) -> str:
    """The share that is needed; times, where per cent would be absurd."""
    if not usable:
        return ""
    share = needed / usable
    return f" ({share:.1%})" if share < FEW else f" ({share:,.0f} times)"


def parts_of(memory: Memory) -> list[Part]:
    """Kind and bytes of all that is held against the limit, allocator and context included."""
    sums: dict[str, int] = {str(k): n for k, n in sum_by_kind(memory.entries).items()}
    for kind, nbytes in _beyond_the_entries(memory).items():
        sums[kind] = sums.get(kind, 0) + nbytes
    return [(kind, n) for kind, n in sums.items() if n]


def _beyond_the_entries(memory: Memory) -> dict[str, int]:
    """What the three numbers say beyond the entries.

    A prediction's add up to the allocated peak; a certificate's hold the allocator's and the
    context's share themselves.
    """
    reserved, total = memory.peak_reserved, memory.device_total
    if reserved is None or total is None:  # and what is needed is the allocated peak alone
        return {}
    held = sum_by_kind(memory.entries)
    context = held.pop(Kind.CONTEXT, 0)
    return {
        "fragmentation": max(0, reserved - sum(held.values())),
        "context": max(0, total - reserved - context),
    }


def show_bar(console: Console, memory: Memory) -> None:
    """The stacked bar at the peak against the usable line."""
    width, ascii_only = console.width - 2 * INDENT, console.ascii_only
    parts = parts_of(memory)
    console.write()
    show(console, stacked_bar(parts, line=memory.usable, width=width, ascii_only=ascii_only))
    show(console, scale(sum(n for _, n in parts), memory.usable, width=width))


def show_breakdown(console: Console, memory: Memory) -> None:
    """Bytes by kind at the peak with the reason of each, and every entry."""
    heading(console, f"Memory at the peak ({PHASES.get(memory.peak_phase, memory.peak_phase)})")
    table = make_table("", "kind", "bytes", "share", "because", numbers=("bytes", "share"))
    parts = parts_of(memory)
    total = sum(n for _, n in parts)
    reasons = _reasons(memory.entries)
    beyond = {k: BEYOND[k] for k, n in _beyond_the_entries(memory).items() if n}
    for kind, nbytes in parts:
        character, colour = fill(kind, ascii_only=console.ascii_only)
        table.add_row(
            Styled(character * 2, colour),
            kind,
            units.show_bytes(nbytes),
            f"{nbytes / total:.1%}",
            plain(console, "; ".join(filter(None, (beyond.get(kind), reasons.get(kind))))),
        )
    table.add_row("", "total", units.show_bytes(total), "", "", style="bold")
    show(console, table)
    _show_entries(console, memory.entries)


def _reasons(entries: tuple[Entry, ...]) -> dict[str, str]:
    """The reason of each kind's largest entry, and how many more there are."""
    largest: dict[str, Entry] = {}
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.kind] = counts.get(entry.kind, 0) + 1
        if entry.kind not in largest or entry.nbytes > largest[entry.kind].nbytes:
            largest[entry.kind] = entry
    reasons = {}
    for kind, entry in largest.items():
        more = f" (+{counts[kind] - 1} more)" if counts[kind] > 1 else ""
        reasons[kind] = f"{entry.owner}: {entry.because}{more}"
    return reasons


def _show_entries(console: Console, entries: tuple[Entry, ...]) -> None:
    heading(console, "Every entry at the peak")
    table = make_table("kind", "owner", "bytes", "because", numbers=("bytes",))
    for e in sorted(entries, key=lambda e: -e.nbytes):
        table.add_row(e.kind, e.owner, units.show_bytes(e.nbytes), plain(console, e.because))
    show(console, table)


def show_instants(console: Console, peaks: Mapping[str, int], peak_phase: str) -> None:
    """The peak of each phase; the largest is marked in words."""
    heading(console, "Instants")
    table = make_table("phase", "peak", "", "", numbers=("peak",))
    highest = max(peaks.values(), default=0)
    width = 12 if console.width < WIDE else 24
    for phase, nbytes in peaks.items():
        marked = phase == peak_phase
        bar = share_bar(
            nbytes / highest if highest else 0, width=width, ascii_only=console.ascii_only
        )
        table.add_row(
            PHASES.get(phase, phase),
            units.show_bytes(nbytes),
            bar,
            "<- peak" if marked else "",
            style="bold" if marked else "",
        )
    show(console, table)
