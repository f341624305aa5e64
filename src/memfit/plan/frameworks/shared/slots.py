"""Pipelines of many recipes at once: the few stages that differ, evaluated for all candidates.

A slot is one stage of every kind of pipeline. Slot 0 is the last stage, which alone has a loss, so
that a formula may ask in plain Python whether it describes the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from memfit.plan.frameworks import Instant, Peaks
from memfit.plan.frameworks.shared.columns import take
from memfit.plan.step_time.arrays import Number, larger
from memfit.records import Record
from memfit.records.ledger import Kind, Phase

ROWS = 2**15  # candidates at a time: their columns stay in the processor's cache


class Slot(NamedTuple):
    """One stage of every kind of pipeline that has it."""

    last: bool
    numbers: dict[str, Any]  # arrays, one element a kind of pipeline
    present: Any  # whether a kind of pipeline has such a stage


class Slots:
    """The stages of all kinds of pipelines."""

    def __init__(self, kinds: int) -> None:
        self.kinds = kinds
        self.slots: list[Slot] = []

    def put(self, place: int, rows: Any, count: Record) -> None:
        """A stage of the kinds of pipeline in `rows`: its numbers, of which `last` is plain."""
        import numpy

        names = [name for name in count.__struct_fields__ if name != "last"]
        while len(self.slots) <= place:
            numbers = {name: numpy.zeros(self.kinds, numpy.int64) for name in names}
            self.slots.append(Slot(not self.slots, numbers, numpy.zeros(self.kinds, bool)))
        slot = self.slots[place]
        for name in names:
            slot.numbers[name][rows] = getattr(count, name)
        slot.present[rows] = True

    def candidates(self, kind_of: Any) -> Iterator[tuple[Any, bool, dict[str, Any]]]:
        """Some rows of the candidates, whether it is their last stage, and its numbers.

        kind_of: the kind of pipeline of every candidate. The last stage comes last.
        """
        import numpy

        for start in range(0, len(kind_of), ROWS):
            kinds = kind_of[start : start + ROWS]
            for slot in (*self.slots[1:], *self.slots[:1]):
                inside = numpy.flatnonzero(slot.present[kinds])
                if len(inside):
                    yield inside + start, slot.last, take(slot.numbers, kinds[inside])


def find_peaks(
    slots: Slots,
    kind_of: Any,
    describe: Callable[[Any, bool, dict[str, Any]], Mapping[Phase, Instant]],
) -> Peaks:
    """The fullest stage of each candidate; describe: rows, last, numbers -> what is alive."""
    import numpy

    peaks, lives, least = (numpy.zeros(len(kind_of), numpy.int64) for _ in range(3))
    for rows, last, numbers in slots.candidates(kind_of):
        peak, live, step = _sum_up(describe(rows, last, numbers))
        fuller = peak > peaks[rows]
        lives[rows] = numpy.where(fuller, live, lives[rows])
        peaks[rows] = larger(peaks[rows], peak)
        least[rows] = larger(least[rows], step)
    return Peaks(allocated=lives, peak=peaks, least=least)


def _sum_up(instants: Mapping[Phase, Instant]) -> tuple[Number, Number, Number]:
    """The largest instant, with and without blocks that cannot be used; the optimizer's step."""
    peak: Number = 0
    live: Number = 0
    step: Number = 0
    for phase, held in instants.items():
        total: Number = sum(nbytes for nbytes, _ in held.values())
        wasted = sum(n for (kind, _), (n, _) in held.items() if kind is Kind.FRAGMENTATION)
        peak, live = larger(peak, total), larger(live, total - wasted)
        if phase is Phase.OPTIMIZER_STEP:
            step = total
    return peak, live, step
