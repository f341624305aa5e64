"""How long a run takes beside its steps: evaluations and checkpoints that are still to come."""

from __future__ import annotations

from typing import NamedTuple

FORWARD = 1 / 3  # of a step's products, those of its forward


class Due(NamedTuple):
    """What a run does beside its steps, and how much of it."""

    steps: int
    save_every: int
    evaluate_every: int  # 0: nothing is held out
    sample: int  # held-out tokens of an evaluation before the last
    whole: int  # and of the last one
    step_tokens: int  # tokens of a step


class TimeBeside:
    """Seconds of evaluations and checkpoints after a step, by those that were timed.

    Until one was, an evaluation is taken to cost what the forward of as many tokens does.
    """

    def __init__(self, due: Due) -> None:
        self._due = due
        self._evaluated: tuple[float, int] | None = None  # seconds and tokens of the newest
        self._save = 0.0
        self._step = 0.0

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self._step = seconds

    def note_evaluation(self, seconds: float, *, last: bool) -> None:
        """An evaluation took so long."""
        self._evaluated = seconds, self._due.whole if last else self._due.sample

    def note_save(self, seconds: float) -> None:
        """A checkpoint took so long."""
        self._save = seconds

    def after(self, step: int) -> float:
        """Seconds beside the steps that are left when `step` of them are done and evaluated."""
        due = self._due
        saves = due.steps // due.save_every - (step - 1) // due.save_every
        saves += bool(due.steps % due.save_every)
        seconds = saves * self._save
        if not due.evaluate_every or step >= due.steps:
            return seconds
        samples = (due.steps - 1) // due.evaluate_every - step // due.evaluate_every
        return seconds + (samples * due.sample + due.whole) * self._each()

    def _each(self) -> float:
        """Seconds of one held-out token."""
        if self._evaluated is not None and self._evaluated[1]:
            return self._evaluated[0] / self._evaluated[1]
        return FORWARD * self._step / max(1, self._due.step_tokens)
