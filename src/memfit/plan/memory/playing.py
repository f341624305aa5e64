"""Recordings played onto a tape, once or several times: their storages are numbered anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from memfit.allocator.quick import Ask
from memfit.meta import Meter
from memfit.plan.simulate.setting import Mark, Recording, Setting
from memfit.plan.step_time.pipeline.orders import Piece
from memfit.records.ledger import Kind, Phase

NOTHING: Ask = (0, 0)
Spans = tuple[tuple[int, int], ...]  # of a meter's events


class Reel:
    """What a tape takes of one recording's events, worked out once for all the times it is played.

    What the recording holds of the loaded weights stands on the tape already.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.each = max(meter.counts, default=1)  # numbers of a storage: it may stand for several
        self._asks: dict[int, list[Ask]] = {}
        self._alive: dict[tuple[Spans, int], list[int]] = {}

    def asks(self, start: int) -> list[Ask]:
        """What each number takes; what is born before the event `start` is another run's."""
        if start not in self._asks:
            meter = self.meter
            own = list(zip(meter.requested, meter.streams, strict=True))
            others = sum(event >= 0 for event in meter.events[:start])
            own[:others] = [NOTHING] * others
            for index, kind in enumerate(meter.kinds):
                if kind is Kind.PARAMETERS:
                    own[index] = NOTHING
            if self.each > 1:
                own = [ask for ask in own for _ in range(self.each)]
            self._asks[start] = own
        return self._asks[start]

    def find_alive(self, spans: Spans, start: int) -> list[int]:
        """The storages that are born in these spans and do not die in them; start: of `asks`."""
        if (spans, start) not in self._alive:
            asks, each = self.asks(start), self.each
            played = [event for begin, end in spans for event in self.meter.events[begin:end]]
            dead = {~event for event in played if event < 0}
            born = (event for event in played if event >= 0 and event not in dead)
            self._alive[spans, start] = [event for event in born if asks[event * each][0]]
        return self._alive[spans, start]


class Playing:
    """One run of a reel's events, or of some of them; the numbers of its storages begin at
    `first`."""

    def __init__(self, reel: Reel, first: int, start: int = 0) -> None:
        self.reel, self.first, self.start = reel, first, start
        self.asks = reel.asks(start)
        self._spans: list[tuple[int, int]] = []

    def play(self, start: int, stop: int) -> list[int]:
        """The codes of those events, as `allocator.quick` reads them."""
        first, events = self.first, self.reel.meter.events[start:stop]
        if self._spans and self._spans[-1][1] == start:  # cut elsewhere, it is the same run
            start = self._spans.pop()[0]
        self._spans.append((start, stop))
        if self.reel.each == 1:
            return [event + first if event >= 0 else event - first for event in events]
        return [
            number if event >= 0 else ~number
            for event in events for number in self._numbers(event if event >= 0 else ~event)
        ]  # fmt: skip

    def find_alive(self) -> dict[int, range]:
        """The numbers of each storage that was born and did not die."""
        alive = self.reel.find_alive(tuple(self._spans), self.start)
        return {storage: self._numbers(storage) for storage in alive}

    def _numbers(self, storage: int) -> range:
        start = self.first + storage * self.reel.each
        return range(start, start + self.reel.meter.counts[storage])


class Part(NamedTuple):
    """A micro-batch of a recording, or a stage's part of one, its batch's tensors among it."""

    start: int  # of the meter's events
    stop: int
    marks: list[Mark]
    phase: Phase  # in which it begins
    product: int  # where the first product of the recording is


def cut_pieces(recording: Recording, setting: Setting, *, first: bool) -> Iterator[Part]:
    """The pieces of a run's first step, or of its second.

    Of a step that updates within backward, the recording's second half is the second step's.
    """
    half = len(recording.passes) // 2 if setting.micro_batches == "of_two_steps" else 0
    ends = [marks[-1].event for marks in recording.passes[:-1]]
    edges = pairwise((0, *ends, recording.stop))
    phase = Phase.FIRST_STEP if first else Phase.FORWARD
    orders = setting.stages.order if setting.stages is not None else ()
    for number, ((start, stop), marks) in enumerate(zip(edges, recording.passes, strict=True)):
        if half and (number < half) is not first:
            continue
        if not first and _is_later(number - half, orders):
            phase = Phase.ACCUMULATE
        yield Part(start, stop, marks, phase, recording.product)


def _is_later(number: int, order: Sequence[Piece]) -> bool:
    """Whether a pass is of a further micro-batch; of stages, from the second forward on.

    order: of a rank's stages, before and after which a recording has a pass of its own.
    """
    if not order:
        return number > 0
    forwards = [n for n, p in enumerate(order, 1) if p.pass_ == "F" and p.micro_batch == 1]
    return bool(forwards) and number >= forwards[0]
