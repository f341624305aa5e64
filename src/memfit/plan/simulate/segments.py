"""The stretches of a simulated step: what each adds and how far it rises above its start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

import msgspec

from memfit.meta import Meter
from memfit.plan.simulate.blocks import AFTER_PRODUCT, ROUNDING, Parts, record
from memfit.plan.simulate.setting import Batch, Mark, Recording, Repeat, Setting
from memfit.records.ledger import Phase


class Segment(msgspec.Struct):
    """A stretch of the step: what it adds in the end, and its highest point."""

    name: str
    net: Parts
    rise: int  # bytes of tensors at the highest point, above the start
    top: Parts  # the parts of that rise


class Passes(msgspec.Struct):
    """The segments of one micro-batch."""

    forward: list[Segment] = []
    loss: list[Segment] = []
    backward: list[Segment] = []


class Level(msgspec.Struct):
    """What is alive now, and at the highest point of each phase so far.

    Which instant is the highest is decided by the tensors, as in the certificate's ledger: by how
    much their blocks are larger is an estimate that must not choose between equal instants.
    """

    live: Parts = {}
    total: int = 0
    peaks: dict[Phase, tuple[int, Parts]] = {}

    def add(self, parts: Parts, times: int = 1) -> None:
        """Change what is alive."""
        for part, nbytes in parts.items():
            self.live[part] = self.live.get(part, 0) + nbytes * times
            self.total += nbytes * times if part != ROUNDING else 0

    def reset(self, live: Parts) -> None:
        """What was alive at an earlier instant is alive, and nothing else."""
        self.live = live
        self.total = sum(n for part, n in live.items() if part != ROUNDING)

    def note(self, phase: Phase, top: Parts | None = None, rise: int | None = None) -> None:
        """An instant of a phase: what is alive and `top`, whose tensors are `rise` bytes."""
        if rise is None:
            rise = sum(n for part, n in (top or {}).items() if part != ROUNDING)
        height = self.total + rise
        known = self.peaks.get(phase)
        if known is None or height > known[0]:
            parts = dict(self.live)
            for part, nbytes in (top or {}).items():
                parts[part] = parts.get(part, 0) + nbytes
            self.peaks[phase] = (height, parts)

    def walk(self, phase: Phase, segments: list[Segment], times: int) -> None:
        """Run segments repeatedly; the first and the last time decide."""
        self._once(phase, segments)
        if times > 1:
            for segment in segments:
                self.add(segment.net, times - 2)
            self._once(phase, segments)

    def _once(self, phase: Phase, segments: list[Segment]) -> None:
        for segment in segments:
            self.note(phase, segment.top, segment.rise)
            self.add(segment.net)


def simulate(setting: Setting, batch: Batch) -> list[Passes]:
    """The segments of one shape: of a first micro-batch, and of a later one where there is any."""
    return cut(record(setting, batch))


def cut(recording: Recording) -> list[Passes]:
    """The segments of each of its passes."""
    return [_cut(recording.meter, marks) for marks in recording.passes]


def _cut(meter: Meter, marks: list[Mark]) -> Passes:
    passes = Passes()
    target = passes.forward
    for mark, until in pairwise(marks):
        if mark.name == "loss":
            target = passes.loss
        elif mark.name == "head":
            target = passes.backward
        target.append(_segment(meter, mark, until))
    return passes


def _segment(meter: Meter, mark: Mark, until: Mark) -> Segment:
    requested, counts = meter.requested, meter.counts
    kinds, owners = meter.kinds, meter.owners
    events = meter.events[mark.event : until.event]
    level = rise = top_at = 0
    for at, event in enumerate(events, start=1):
        if event >= 0:
            level += requested[event] * counts[event]
            if level > rise and counts[event] == 1:
                rise, top_at = level, at
        else:
            level -= requested[~event] * counts[~event]
    net: Parts = {}
    top: Parts = {}
    rests: dict[int, int] = {}  # by how much a block is larger than its tensor
    for at, event in enumerate(events):
        if at == top_at:
            top = dict(net)
        index, times = (event, counts[event]) if event >= 0 else (~event, -counts[~event])
        part, nbytes = (kinds[index], owners[index]), requested[index]
        net[part] = net.get(part, 0) + times * nbytes
        if nbytes not in rests:
            rests[nbytes] = meter.held(index) - nbytes
        if rest := rests[nbytes]:
            net[ROUNDING] = net.get(ROUNDING, 0) + times * rest
    if top_at == len(events):
        top = dict(net)
    return Segment(mark.name, net, rise, top)


def expand(
    segments: Iterable[Segment], counts: list[Repeat]
) -> Iterator[tuple[list[Segment], int]]:
    """Stretches of segments, each with how often it runs in the deep model.

    What follows the first product begins a stretch of its own: it is of the last block at most.
    """

    def repeat(segment: Segment) -> Repeat:
        name, after, _ = segment.name.partition(AFTER_PRODUCT)
        name, _, index = name.partition(" ")
        if after or name != "block":
            return Repeat(-1 - bool(after), 1)
        return counts[int(index)]

    for found, stretch in groupby(segments, repeat):
        yield list(stretch), found.times
