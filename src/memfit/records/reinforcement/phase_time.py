"""Seconds of one phase of an iteration of reinforcement learning."""

from __future__ import annotations

from memfit.records import Record


class PhaseTime(Record, frozen=True, kw_only=True):
    """One phase of an iteration, predicted, every length at its bound; None is unknown."""

    phase: str  # switch, prefill, decode, reward, score, reference, values, update
    seconds: float | None
    seconds_low: float | None  # the range to expect of such predictions
    seconds_high: float | None
    tokens: int  # that the phase reads, samples or learns from
    tokens_per_second: float | None
    because: str
