"""What the ranks of a run wait for: one step now and then under torch's profiler, on all at once.

A collective ends on no rank before the last one has come to it, so whoever comes late waits least:
the others' collectives run long with nothing to compute beside them. Both numbers are read off one
rank's own events, without a clock that ranks would have to share.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median_high
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from memfit.train.distributed.ranks import Ranks

# what torch's profiler calls the work of its process groups: gloo's on the host, NCCL's kernels
COLLECTIVES = ("gloo:", "nccl")
LATE = 0.1  # of a step: a rank that waits so much less than the others is named
AFFORDED = 0.02  # of a run's time: what looking may cost

Interval = tuple[float, float]  # begin and end


class Waits(NamedTuple):
    """Seconds of one step on one rank."""

    communicating: float  # a collective runs
    exposed: float  # of those: nothing computes meanwhile


def read_waits(events: Iterable[Any], device_type: str) -> Waits:
    """The collectives of a profile, and what of them no computing covers.

    events: `torch.profiler`'s, of one step. device_type: on `cuda` its kernels count, else the
    host's operators.
    """
    cuda = device_type == "cuda"
    collectives: list[Interval] = []
    computing: list[Interval] = []
    for event in events:
        if event.device_type.name != device_type.upper():
            continue
        span = event.time_range.start, event.time_range.end
        if event.name.startswith(COLLECTIVES):
            collectives.append(span)
        elif not event.is_user_annotation if cuda else event.name.startswith("aten::"):
            computing.append(span)
    exposed = covered([*collectives, *computing]) - covered(computing)
    return Waits(covered(collectives) / 1e6, exposed / 1e6)


def covered(spans: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def find_late(exposed: Sequence[float], seconds: float, groups: int = 1) -> list[int]:
    """The ranks that the others wait for: those that wait less than the middle of their group by
    `LATE` of a step.

    exposed: of all ranks. groups: stages, which wait for each other by design: each rank is held
    against those of its own.
    """
    each = len(exposed) // groups
    found = []
    for rank, own in enumerate(exposed):
        start = rank - rank % each
        middle = median_high(exposed[start : start + each])
        if middle - own > LATE * seconds:
            found.append(rank)
    return found


class Waiting:
    """When steps are looked at, and who was late; every rank decides alike."""

    def __init__(self, ranks: Ranks, *, first: int, every: int, groups: int) -> None:
        """first: steps of this process before the first that is looked at. every: from one to the
        next at least. groups: stages."""
        self._ranks, self._first, self._every, self._groups = ranks, first, every, groups
        self._next: int | None = None
        self._late: set[int] = set()  # at the step that was looked at last
        self._reported: set[int] = set()
        self._cost = self._seconds = 0.0  # of looking, of the step itself
        self.waits: Waits | None = None  # of the step that was looked at last

    def due(self, index: int) -> bool:
        """Whether step `index` is looked at."""
        if self._next is None:
            self._next = index + self._first
        return self._ranks.size > 1 and index >= self._next

    @contextmanager
    def look(self, device: torch.device) -> Iterator[None]:
        """Profile the step that runs within; on a GPU its end waits for the device."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it tells the user that it begins
        cuda = device.type == "cuda"
        begin = time.perf_counter()
        profiler: Any = profile(
            activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
        )
        with profiler:
            start = time.perf_counter()
            yield
            if cuda:
                torch.cuda.synchronize(device)
            end = time.perf_counter()
        with _disable_current_modes():
            self.waits = read_waits(profiler.events() or (), device.type)
        self._seconds = end - start
        self._cost = time.perf_counter() - begin - self._seconds

    def tell(self, index: int) -> Iterator[str]:
        """What there is to say after step `index`, which was looked at: of each rank that was late
        twice in a row, once."""
        assert self.waits is not None
        found = self._ranks.gather(self.waits.exposed, self._cost, self._seconds)
        exposed, costs, seconds = ([row[i] for row in found] for i in range(3))
        step = max(seconds)
        affordable = math.ceil(max(costs) / (AFFORDED * step)) if step else 0
        self._next = index + max(self._every, affordable)
        late = set(find_late(exposed, step, self._groups))
        for rank in sorted((late & self._late) - self._reported):
            self._reported.add(rank)
            longest = max(exposed)
            yield (
                f"rank {rank} is late: other ranks wait up to {longest:.3g} s of a step of"
                f" {step:.3g} s for collectives with nothing to compute, it {exposed[rank]:.3g} s"
            )
        self._late = late
