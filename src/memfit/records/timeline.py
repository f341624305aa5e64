"""Seconds: what runs, on which stream, from when, for how long, and why."""

from __future__ import annotations

from memfit.records import Record


class Span(Record, frozen=True, kw_only=True):
    """One piece of work."""

    op: str
    stream: str
    start: float
    duration: float
    flop: float
    because: str


class Timeline(Record, frozen=True, kw_only=True):
    """The spans of one optimizer step; empty when the device's speed is unknown."""

    spans: tuple[Span, ...]

    @property
    def streams(self) -> tuple[str, ...]:
        """What runs side by side, in the order in which it begins; on each, one span at a time."""
        by_start = sorted(self.spans, key=lambda span: span.start)
        return tuple(dict.fromkeys(span.stream for span in by_start))

    @property
    def seconds(self) -> float | None:
        """End of the last span; None when nothing is known."""
        return max((s.start + s.duration for s in self.spans), default=None)
