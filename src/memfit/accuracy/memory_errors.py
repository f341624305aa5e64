"""What memfit's predictions are worth: every row of the corpus, predicted today, beside its figure.

An error is signed, predicted / measured - 1. Figures whose source does not say what it counted are
compared with reserved bytes. Headlines exclude them, and rows of low confidence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from memfit import families
from memfit.accuracy.corpus import OWN, Refused, Row
from memfit.adapters import find_adapter
from memfit.catalog.overheads import find_outside
from memfit.core import units
from memfit.core.errors import Error
from memfit.plan.frameworks import find_framework
from memfit.plan.memory.declared import describe_ledger, find_waiting, predict_ledger
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.memory.verdict import SLACK, describe_memory, find_needed, find_streams
from memfit.plan.request.problem import find_device
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.ledger import Ledger
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.records.results import Memory, Verdict

Verdicts = Literal["fits", "at_risk", "does_not_fit"]
CAPACITIES = (16, 24, 40, 48, 80, 96, 141, 192)  # GiB on the boxes of today's cards
WAYS = ("source", "framework", "device", "kind", "model", "confidence", "split")


class Compared(Record, frozen=True, kw_only=True):
    """One measured figure and what is predicted for its recipe."""

    id: str
    source: str  # the repository
    framework: str
    device: str
    model: str
    kind: str  # what was counted, as in the corpus
    confidence: str
    split: str
    headline: bool  # whether it enters the headline: kind known, confidence high or medium
    measured: float
    spread: float  # by rounding or between repetitions, either side
    predicted: int
    low: int  # the band of the prediction: allocator slack and context at their ends
    high: int

    @property
    def error(self) -> float:
        """Signed, as a fraction of what was measured."""
        return self.predicted / self.measured - 1


class Outcome(Record, frozen=True, kw_only=True):
    """A run that ran out of memory, and the verdict that it would have had."""

    id: str
    source: str
    framework: str
    device: str
    confidence: str
    predicted: int | None  # device total, bytes
    usable: int | None
    verdict: Verdict

    @property
    def right(self) -> bool:
        """Return whether memfit predicted that it does not fit."""
        over = None not in (self.predicted, self.usable) and self.predicted > self.usable  # type: ignore[operator]
        return self.verdict == "does_not_fit" or over


class Group(Record, frozen=True, kw_only=True):
    """Errors of some figures, as fractions."""

    name: str
    figures: int
    median: float  # of absolute errors
    p90: float
    worst: float
    bias: float  # the mean of signed errors
    median_signed: float


class Capacity(Record, frozen=True, kw_only=True):
    """Verdicts on a card of this size over all figures of the whole device or of reserved bytes."""

    gib: int
    figures: int
    false_fits: int  # said to fit, and measured above the card
    at_risk: int
    missed: int  # said not to fit, and measured below
    withheld: float  # median share of the card between what was measured and what counts as full


class Accuracy(Record, frozen=True, kw_only=True):
    """The whole comparison."""

    schema: int = 1
    compared: tuple[Compared, ...]
    outcomes: tuple[Outcome, ...]
    refused: tuple[Refused, ...]
    headline: Group | None
    unspecified: Group | None
    capacities: tuple[Capacity, ...]

    def by(self, way: str) -> tuple[Group, ...]:
        """Headline figures grouped by a field of `Compared`, the largest group first."""
        return group_by(self.compared, lambda c: str(getattr(c, way)))


def compare(rows: Iterable[Row], refused: Iterable[Refused] = ()) -> Accuracy:
    """Predict every row and compare; a row that memfit refuses is counted with its reason."""
    compared: list[Compared] = []
    outcomes: list[Outcome] = []
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        if not (row.memory or row.out_of_memory):  # of its time alone
            continue
        try:
            memory, band = predict(row)
        except Error as error:
            key = (error.message, repository(row))
            reasons[key] = reasons.get(key, 0) + 1
            continue
        if row.out_of_memory:
            outcomes.append(_outcome(row, memory))
        compared += _figures(row, memory, band)
    refused = [r for r in refused if r.use == "memory"]
    found = [Refused(reason=r, source=s, rows=n) for (r, s), n in sorted(reasons.items())]
    head = [c for c in compared if c.headline]
    return Accuracy(
        compared=tuple(compared),
        outcomes=tuple(outcomes),
        refused=(*refused, *found),
        headline=summarise("all", head),
        unspecified=summarise("kind unknown", [c for c in compared if c.kind == "unspecified"]),
        capacities=tuple(_capacities(compared)),
    )


# Slack low and high; bytes outside the allocator low and high; those given back when asked.
Band = tuple[float, float, int, int, int]


def predict(row: Row) -> tuple[Memory, Band]:
    """Today's prediction of a row's recipe, and the band of what it adds to allocated bytes.

    Raises InvalidRequest or UnknownName: what memfit does not describe.
    """
    recipe, device = row.recipe, find_device(row.recipe.device)
    model = families.read_model(recipe.model)
    if recipe.is_own:
        return _own(recipe, find_adapter(recipe).adapt(model, recipe), device)
    waiting = find_waiting(recipe, model, device)
    return _foreign(row, predict_ledger(recipe, model, device), device, waiting)


def _own(recipe: Recipe, model: Model, device: Device) -> tuple[Memory, Band]:
    ledger = predict_memory(model, recipe, device)
    whose = "the device's memory"
    if device.is_cpu:
        return describe_memory(ledger, device, device.memory, whose), (1.0, 1.0, 0, 0, 0)
    streams = find_streams(model, recipe, device)
    needed = find_needed(SLACK, ledger.peak, device, recipe.parallel, streams)
    memory = describe_memory(ledger, device, device.memory, whose, needed)
    outside = find_outside(device, recipe.parallel)
    ends = (outside.low, outside.high) if outside else (0, 0)
    return memory, (SLACK.low, SLACK.high, *ends, 0)


def _foreign(
    row: Row, ledger: Ledger, device: Device, waiting: tuple[int, str]
) -> tuple[Memory, Band]:
    memory = describe_ledger(ledger, row.recipe, device, device.memory, waiting)
    framework, parallel = find_framework(row.recipe.framework), row.recipe.parallel
    slack = framework.slack
    outside = find_outside(device, parallel, framework.count_groups(parallel))
    ends = (outside.low, outside.high) if outside else (0, 0)
    # blocks that cannot be used again come first
    held = ledger.peak / (memory.peak_allocated or ledger.peak)
    return memory, (slack.low * held, slack.high * held, *ends, waiting[0])


def _figures(row: Row, memory: Memory, band: Band) -> Iterable[Compared]:
    for kind, measured in row.memory.items():
        allocated = kind in ("peak_allocated", "peak_active")
        whole = kind == "device_total"
        predicted = memory.peak_allocated if allocated else memory.peak_reserved
        predicted = memory.device_total if whole else predicted
        peak = memory.peak_allocated
        if predicted is None or peak is None:
            continue
        low, high, least, most, waits = band
        yield Compared(
            id=row.id,
            source=repository(row),
            framework=row.recipe.framework,
            device=row.recipe.device,
            model=row.recipe.model.name,
            kind=kind,
            confidence=row.source.confidence,
            split=row.split,
            headline=kind != "unspecified" and row.source.confidence != "low",
            measured=measured.value,
            spread=measured.spread,
            predicted=predicted,
            low=peak if allocated else round(peak * low) + least * whole,
            high=peak if allocated else round(peak * high) + most * whole + waits,
        )


def _outcome(row: Row, memory: Memory) -> Outcome:
    return Outcome(
        id=row.id,
        source=repository(row),
        framework=row.recipe.framework,
        device=row.recipe.device,
        confidence=row.source.confidence,
        predicted=memory.device_total,
        usable=memory.usable,
        verdict=memory.verdict,
    )


def repository(row: Row) -> str:
    """Where a row comes from, without the page."""
    return OWN if row.source.name == OWN else row.source.name.split(" ")[0]


def summarise(name: str, figures: Sequence[Compared]) -> Group | None:
    """The errors of these figures; None of none."""
    if not figures:
        return None
    errors = [f.error for f in figures]
    sizes = sorted(map(abs, errors))
    return Group(
        name=name,
        figures=len(sizes),
        median=statistics.median(sizes),
        p90=quantile(sizes, 0.9),
        worst=sizes[-1],
        bias=statistics.fmean(errors),
        median_signed=statistics.median(errors),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed; ordered ascending."""
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


def group_by(figures: Iterable[Compared], key: Callable[[Compared], str]) -> tuple[Group, ...]:
    """Headline figures by a key, the largest group first."""
    groups: dict[str, list[Compared]] = {}
    for figure in figures:
        if figure.headline:
            groups.setdefault(key(figure), []).append(figure)
    made = [summarise(name, group) for name, group in groups.items()]
    return tuple(sorted((g for g in made if g), key=lambda g: (-g.figures, g.name)))


def _capacities(figures: Sequence[Compared]) -> Iterable[Capacity]:
    """Would the verdict have been right on a card of another size? A figure answers for each."""
    known = [f for f in figures if f.headline and f.kind in ("peak_reserved", "device_total")]
    for gib in CAPACITIES:
        size = gib * units.GIB
        near = [f for f in known if 0.5 * size < f.measured < 2 * size]
        if not near:
            continue
        fits = [f for f in near if f.high <= size]
        over = [f for f in near if f.low > size]
        used = [(max(f.high, f.predicted) - f.measured) / size for f in near if f.measured <= size]
        yield Capacity(
            gib=gib,
            figures=len(near),
            false_fits=sum(f.measured > size for f in fits),
            at_risk=len(near) - len(fits) - len(over),
            missed=sum(f.measured <= size for f in over),
            withheld=statistics.median(used) if used else 0.0,
        )
