"""What a user sees while a model trains: two live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple, Protocol, TextIO, cast

from memfit.core import units
from memfit.core.system.streams import guard, in_lines

PLAIN_LINES = 20  # of a run that is not on a terminal, beside one every half a minute
PLAIN_SECONDS = 30.0
RECENT = 20  # steps that the remaining time is read off
EMPTY, FULL = "╌", "━"


class Facts(NamedTuple):
    """What is known before the first step; None is unknown."""

    steps: int
    done: int  # steps of an earlier start of the same run
    predicted_step_seconds: float | None
    certified_peak: int | None  # bytes


class Moment(NamedTuple):
    """One step that is done."""

    step: int  # 1 is the first
    loss: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    memory: int  # bytes, the measured peak so far; 0: a compiled step on a CPU, not counted
    evaluation_loss: float | None
    skipped: int = 0  # steps so far that updated nothing
    reward_accuracy: float | None = None  # share of the step's pairs that are put right
    reward: float | None = None  # mean of the sampled answers
    length: float | None = None  # of these, mean tokens
    unjudged: float | None = None  # share of them that no function gave a reward
    beside: float = 0.0  # seconds of the evaluations and checkpoints that are still to come


class Progress(Protocol):
    """A display of a run; `begin` is called first and `end` last, also after a failure."""

    def begin(self, facts: Facts) -> None:
        """The run is about to take its first step."""

    def note(self, text: str) -> None:
        """Something that the user should read."""

    def show(self, moment: Moment) -> None:
        """A step is done."""

    def end(self) -> None:
        """There will be no more."""


class Silent:
    """Tells nobody."""

    def begin(self, facts: Facts) -> None:
        """See `Progress`."""

    def note(self, text: str) -> None:
        """See `Progress`."""

    def show(self, moment: Moment) -> None:
        """See `Progress`."""

    def end(self) -> None:
        """See `Progress`."""


class Plain:
    """A line now and then, for a pipe or a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._facts = Facts(0, 0, None, None)
        self._recent: list[float] = []
        self._shown = 0.0

    def begin(self, facts: Facts) -> None:
        """See `Progress`."""
        self._facts = facts
        self._shown = time.monotonic()

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._write(in_lines(text))

    def show(self, moment: Moment) -> None:
        """Every twentieth of the run, the first, the last, and twice a minute."""
        self._recent = [*self._recent[1 - RECENT :], moment.seconds]
        every = -(-self._facts.steps // PLAIN_LINES)
        first = moment.step == self._facts.done + 1
        due = first or moment.step % every == 0 or moment.step == self._facts.steps
        now = time.monotonic()
        if due or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            left = remaining(self._facts, moment, self._recent)
            self._write(f"step {moment.step}/{self._facts.steps}  {describe(moment)}  {left}")

    def end(self) -> None:
        """See `Progress`."""
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


class Live:
    """Two lines that are redrawn at the foot of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as Region
        from rich.text import Text

        self._console = Console(file=stream, highlight=False)
        self._text = Text
        self._region = Region(console=self._console, auto_refresh=False)
        self._facts = Facts(0, 0, None, None)
        self._recent: list[float] = []

    def begin(self, facts: Facts) -> None:
        """See `Progress`."""
        self._facts = facts
        self._region.start()

    def note(self, text: str) -> None:
        """Printed above the two lines, and stays."""
        self._console.print(in_lines(text), markup=False)

    def show(self, moment: Moment) -> None:
        """Redraw both lines."""
        self._recent = [*self._recent[1 - RECENT :], moment.seconds]
        width = self._console.width
        first, second = live_lines(self._facts, moment, self._recent, width)
        shown = self._text(no_wrap=True, overflow="ellipsis")
        shown.append(first, style="bold").append("\n").append(second)
        self._region.update(shown, refresh=True)

    def end(self) -> None:
        """Leave the last picture standing."""
        self._region.stop()


def open_progress(stream: TextIO) -> Progress:
    """Live lines when the stream is a terminal, plain ones otherwise; rich honours NO_COLOR."""
    shown = cast(TextIO, guard(stream))  # whoever reads may go, and training goes on
    return Live(shown) if stream.isatty() else Plain(shown)


def live_lines(facts: Facts, moment: Moment, recent: list[float], width: int) -> tuple[str, str]:
    """The bar with the time left, and the numbers with memory, each at most `width` wide."""
    steps = f" {moment.step}/{facts.steps}  {remaining(facts, moment, recent)}"
    room = max(4, width - len(steps) - 1)
    full = room * moment.step // max(1, facts.steps)
    bar = FULL * full + EMPTY * (room - full)
    memory = units.show_bytes(moment.memory, digits=1) if moment.memory else "memory not counted"
    if facts.certified_peak is not None:
        memory += f" of {units.show_bytes(facts.certified_peak, digits=1)} certified"
    numbers = f"{describe(moment)}  {memory}"
    return (bar + steps)[:width], numbers[:width]


def describe(moment: Moment) -> str:
    """Loss, learning rate and speed."""
    line = f"loss {round(moment.loss, 4) + 0.0:.4f}"  # a policy's may be just below 0
    if moment.length is not None:
        reward = "unknown" if moment.reward is None else f"{moment.reward:.3f}"
        reward += f" ({moment.unjudged:.0%} without)" if moment.unjudged else ""
        line = f"reward {reward}  length {moment.length:.1f}  {line}"
    if moment.evaluation_loss is not None:
        line += f"  held-out {moment.evaluation_loss:.4f}"
    if moment.reward_accuracy is not None:
        line += f"  {moment.reward_accuracy:.0%} put right"
    if moment.skipped:
        line += f"  {moment.skipped} skipped"
    speed = units.show_count(moment.tokens_per_second)
    return f"{line}  lr {moment.learning_rate:.1e}  {speed} tokens/s"


def remaining(facts: Facts, moment: Moment, recent: list[float]) -> str:
    """The time left by the last steps, beside what was predicted for them; both with evaluations
    and checkpoints."""
    left = facts.steps - moment.step
    line = f"{units.show_seconds(left * median(recent) + moment.beside)} left"
    if facts.predicted_step_seconds is None or not left:
        return line if left else "done"
    predicted = units.show_seconds(left * facts.predicted_step_seconds + moment.beside)
    return f"{line} (predicted {predicted})"
