"""A step's tape with what each storage on it is: what a timeline is drawn from.

It goes from the certifying process to whoever draws it, and is then thrown away: the tape of a
70B model has tens of thousands of events, and a certificate must stay small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from memfit.allocator.caching import CachingAllocator, OutOfMemory, follow
from memfit.allocator.settings import Settings
from memfit.allocator.tape import Event
from memfit.records import Record
from memfit.records.ledger import Phase
from memfit.records.results import Tensor


class Recording(Record, frozen=True, kw_only=True):
    """What a step allocates and releases, in order."""

    events: tuple[Event, ...]
    marks: tuple[int, ...]  # where each stretch after the first begins
    stretches: tuple[Phase, ...]  # the phase of each: len(marks) + 1
    tensors: dict[int, Tensor]  # what a number in an event is
    settings: Settings | None  # of the allocator; None on a CPU, which has no such one

    def phase_at(self) -> Iterator[Phase]:
        """The phase of each event."""
        bounds = (0, *self.marks, len(self.events))
        for phase, start, stop in zip(self.stretches, bounds, bounds[1:], strict=False):
            for _ in range(start, stop):
                yield phase

    def held(self) -> list[tuple[int, int]]:
        """(allocated, reserved) bytes of the caching allocator after each event; [] on a CPU.

        It ends early where the device had no more to give.
        """
        found: list[tuple[int, int]] = []
        if self.settings is None:
            return found
        allocator = CachingAllocator(self.settings)
        for event in self.events:
            try:
                follow(allocator, event)
            except OutOfMemory:
                break
            found.append((allocator.allocated, allocator.reserved))
        return found


def write_recording(recording: Recording, path: Path) -> None:
    """As MessagePack, which is read and written in a moment."""
    path.write_bytes(msgspec.msgpack.encode(recording))


def read_recording(path: Path) -> Recording:
    """What `write_recording` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Recording)
