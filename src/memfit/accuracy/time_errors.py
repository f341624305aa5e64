"""What predicted step times are worth: every row of the corpus with a time, predicted today.

One weight a source: a table of two hundred rows counts as much as one run. Inside a sweep, that is
rows of one source, model, device and number of devices, what counts is the order: Kendall's tau.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from msgspec.structs import replace

from memfit import families
from memfit.accuracy.corpus import OWN, Refused, Row
from memfit.accuracy.memory_errors import repository
from memfit.adapters import find_adapter
from memfit.core.errors import Error, TimeUnknown
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.predicted_time import find_setting, sum_up
from memfit.plan.step_time.read import Basis, Network, read_basis, read_network, read_setting
from memfit.plan.step_time.step import predict_step
from memfit.plan.step_time.time_range import LEAST, TimeErrors
from memfit.records import Record
from memfit.records.recipe import Recipe

# sources whose times are no measurement of speed -> why
UNTIMED = {
    "NVIDIA/Megatron-LM": "a functional test: its steps are a few milliseconds of work",
    OWN: "memfit's own: a CPU's speed is measured anew wherever a run starts, and a GPU's rates are"
    " this card's",
}
NETWORKS = {"huggingface/nanotron": "efa-32x100"}  # its playbook measured it: links.toml
WAYS = ("source", "framework", "device", "model", "confidence", "split")
NEAR = 0.03  # by so much repetitions of one run differ
MESH = ("tp", "cp", "pp", "virtual_pp", "ep", "dp_shard", "dp_replicate")
SMALLEST_SWEEP = 3  # rows; an order of two says little


class TimeCompared(Record, frozen=True, kw_only=True):
    """One measured step and what is predicted for its recipe."""

    id: str
    source: str  # the repository
    framework: str  # the constants' name: `megatron`, `megatron.bridge`
    device: str
    model: str
    devices: int
    confidence: str
    split: str
    recipe: str  # digest of its configuration, whichever release ran
    job: str  # what is the same for all who choose a layout for it
    layout: str  # what they choose: mesh, micro-batch, recomputing
    tokens: float  # of a step
    measured: float  # s
    predicted: float  # s

    @property
    def error(self) -> float:
        """Signed, as a fraction of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def sweep(self) -> tuple[str, str, str, int]:
        """Rows that differ in their configuration alone share it."""
        return self.source, self.model, self.device, self.devices


class TimeGroup(Record, frozen=True, kw_only=True):
    """Errors of some steps, as fractions; each source has one weight."""

    name: str
    rows: int
    sources: int
    median: float
    p90: float
    worst: float
    bias: float


class Sweep(Record, frozen=True, kw_only=True):
    """How far the predicted order of configurations agrees with the measured one."""

    source: str
    model: str
    device: str
    devices: int
    rows: int
    tau: float  # Kendall's, of seconds a token; 1 the same order, -1 the reverse


class Choice(Record, frozen=True, kw_only=True):
    """Several published layouts of one job, and the one that is predicted to be the fastest."""

    source: str
    model: str
    device: str
    devices: int
    layouts: int
    chosen: str
    fastest: str
    loss: float  # measured seconds a token of the chosen one over the fastest one's, less 1

    @property
    def near(self) -> bool:
        """Whether the chosen layout is as good as the fastest, give or take a repetition."""
        return self.loss <= NEAR


class TimeAccuracy(Record, frozen=True, kw_only=True):
    """The whole comparison."""

    schema: int = 1
    compared: tuple[TimeCompared, ...]
    refused: tuple[Refused, ...]
    headline: TimeGroup | None
    test: TimeGroup | None  # of rows that no constant was fitted on
    sweeps: tuple[Sweep, ...]
    choices: tuple[Choice, ...]

    @property
    def near(self) -> float | None:
        """The share of jobs whose chosen layout is as good as the fastest published."""
        return statistics.fmean(c.near for c in self.choices) if self.choices else None

    @property
    def tau(self) -> float | None:
        """The median over sweeps."""
        return statistics.median(s.tau for s in self.sweeps) if self.sweeps else None

    def by(self, way: str) -> tuple[TimeGroup, ...]:
        """Steps grouped by a field of `TimeCompared`, the largest group first."""
        groups: dict[str, list[TimeCompared]] = {}
        for figure in self.compared:
            groups.setdefault(str(getattr(figure, way)), []).append(figure)
        made = [summarise(name, group) for name, group in groups.items()]
        return tuple(sorted((g for g in made if g), key=lambda g: (-g.rows, g.name)))


def time_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Those that say how long a step took, with high or medium confidence, and can be predicted."""
    found, _ = _split(rows)
    return tuple(row for row, _ in found)


def compare_times(rows: Iterable[Row], refused: Iterable[Refused] = ()) -> TimeAccuracy:
    """Predict the step of every row with a time; one that memfit refuses is counted apart."""
    found, reasons = _split(rows)
    compared = tuple(_compared(row, seconds) for row, seconds in found)
    counted = [
        Refused(reason=reason, source=source, rows=n, use="time")
        for (reason, source), n in sorted(reasons.items())
    ]
    return TimeAccuracy(
        compared=compared,
        refused=(*(r for r in refused if r.use == "time"), *counted),
        headline=summarise("all", compared),
        test=summarise("test half", [c for c in compared if c.split == "test"]),
        sweeps=tuple(find_sweeps(compared)),
        choices=tuple(find_choices(compared)),
    )


def _split(
    rows: Iterable[Row],
) -> tuple[list[tuple[Row, float]], dict[tuple[str, str], int]]:
    found: list[tuple[Row, float]] = []
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        if "time.step_seconds" not in row.measurements or row.source.confidence == "low":
            continue
        try:
            check_timed(row)
            found.append((row, predict_seconds(row)))
        except Error as error:
            key = (error.message, repository(row))
            reasons[key] = reasons.get(key, 0) + 1
    return found, reasons


def check_timed(row: Row) -> None:
    """Raise TimeUnknown for a time that says nothing of the device's or the framework's speed."""
    if repository(row) in UNTIMED:
        raise TimeUnknown(UNTIMED[repository(row)])
    if "power-limited" in row.source.notes:
        raise TimeUnknown("the device ran below its rated power, as its source says")


def predict_seconds(row: Row) -> float:
    """Today's prediction of a row's step; raises TimeUnknown."""
    recipe, device, network = row.recipe, find_device(row.recipe.device), network_of(row)
    model = families.read_model(recipe.model)
    if recipe.is_own:  # as a plan says it, which knows what is frozen
        totals = sum_up(find_adapter(recipe).adapt(model, recipe))
        setting = find_setting(totals, recipe, device, network)
    else:
        software = row.environment.get("framework", "")
        setting = read_setting(recipe, model, device, network=network, software=software)
    return float(predict_step(setting).total)


def clock_basis(row: Row) -> Basis:
    """Whose constants a row takes."""
    return read_basis(row.recipe, row.environment.get("framework", ""))


def network_of(row: Row) -> Network:
    """What joined the row's machines, as its source or the row itself says; else the usual one."""
    recipe = row.recipe
    each = recipe.devices_per_node or recipe.parallel.world
    per_device = read_network(row.environment.get("interconnect", ""), each)
    return Network(name=NETWORKS.get(repository(row), ""), per_device=per_device)


def _compared(row: Row, seconds: float) -> TimeCompared:
    recipe = row.recipe
    return TimeCompared(
        id=row.id,
        source=repository(row),
        framework=clock_basis(row).stack,
        device=recipe.device,
        model=recipe.model.name,
        devices=recipe.parallel.world,
        confidence=row.source.confidence,
        split=row.split,
        recipe=_configuration(recipe),
        job=f"{row.source.name} {recipe.sequence_length} {clock_basis(row).narrow}",
        layout=_layout(recipe),
        tokens=float(recipe.global_batch * recipe.sequence_length),
        measured=row.measurements["time.step_seconds"].value,
        predicted=seconds,
    )


def _layout(recipe: Recipe) -> str:
    p = recipe.parallel
    mesh = " ".join(f"{name} {n}" for name in MESH if (n := int(getattr(p, name))) > 1)
    recompute = f"recompute {recipe.recompute} {recipe.recompute_blocks}"
    return f"{mesh or 'one device'}, zero {p.zero}, micro-batch {recipe.micro_batch}, {recompute}"


def _configuration(recipe: Recipe) -> str:
    """A digest that is the same for all releases of a framework."""
    options = {key: value for key, value in recipe.options.items() if key != "version"}
    return replace(recipe, options=options).digest


def summarise(name: str, figures: Sequence[TimeCompared]) -> TimeGroup | None:
    """Errors of these steps, each source with one weight; None of none."""
    if not figures:
        return None
    counts: dict[str, int] = {}
    for figure in figures:
        counts[figure.source] = counts.get(figure.source, 0) + 1
    weights = [1 / counts[f.source] for f in figures]
    errors = [f.error for f in figures]
    pairs = sorted(zip(map(abs, errors), weights, strict=True))
    total = sum(weights)
    return TimeGroup(
        name=name,
        rows=len(figures),
        sources=len(counts),
        median=weighted_quantile(pairs, 0.5),
        p90=weighted_quantile(pairs, 0.9),
        worst=pairs[-1][0],
        bias=sum(e * w for e, w in zip(errors, weights, strict=True)) / total,
    )


def weighted_quantile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest value that this share of all weight does not exceed; pairs ascend."""
    total, reached = sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= share * total * (1 - 1e-9):
            return value
    return ordered[-1][0]


def find_sweeps(figures: Iterable[TimeCompared]) -> Iterable[Sweep]:
    """Sweeps of three recipes or more, and how well their order is predicted."""
    groups: dict[tuple[str, str, str, int], list[TimeCompared]] = {}
    for figure in figures:
        groups.setdefault(figure.sweep, []).append(figure)
    for (source, model, device, devices), group in sorted(groups.items()):
        if len({f.recipe for f in group}) < SMALLEST_SWEEP:
            continue
        tau = kendall(group)
        if tau is not None:
            yield Sweep(
                source=source, model=model, device=device, devices=devices, rows=len(group), tau=tau
            )


def find_choices(figures: Iterable[TimeCompared]) -> Iterable[Choice]:
    """Jobs of which several layouts were measured."""
    jobs: dict[tuple[object, ...], list[TimeCompared]] = {}
    for figure in figures:
        jobs.setdefault((*figure.sweep, figure.job), []).append(figure)
    for group in jobs.values():
        layouts = len({f.layout for f in group})
        if layouts < 2:
            continue
        chosen = min(group, key=lambda f: f.predicted / f.tokens)
        fastest = min(group, key=lambda f: f.measured / f.tokens)
        source, model, device, devices = chosen.sweep
        yield Choice(
            source=source, model=model, device=device, devices=devices, layouts=layouts,
            chosen=chosen.layout, fastest=fastest.layout,
            loss=chosen.measured / chosen.tokens / (fastest.measured / fastest.tokens) - 1,
        )  # fmt: skip


def kendall(figures: Sequence[TimeCompared]) -> float | None:
    """Kendall's tau of seconds a token, over pairs of unlike recipes whose measurements differ."""
    agree = pairs = 0
    for a, b in combinations(figures, 2):
        measured = a.measured / a.tokens - b.measured / b.tokens
        if a.recipe == b.recipe or not measured:
            continue
        predicted = a.predicted / a.tokens - b.predicted / b.tokens
        pairs += 1
        agree += (predicted * measured > 0) - (predicted * measured < 0)
    return agree / pairs if pairs else None


def errors_of(found: TimeAccuracy) -> TimeErrors:
    """What `memfit plan` shows as the range of a step's time; see plan/step_time/time_range.py."""
    unfitted = [row for row in found.compared if row.split == "test"]
    ratios = sorted(row.measured / row.predicted for row in unfitted)
    cuts = statistics.quantiles(ratios, n=20)

    def often(name: str) -> tuple[str, ...]:
        counts = Counter(getattr(row, name) for row in found.compared)
        return tuple(sorted(one for one, n in counts.items() if n >= LEAST))

    return TimeErrors(
        steps=len(ratios),
        low=round(cuts[0], 4),
        high=round(cuts[-1], 4),
        lowest=round(ratios[0], 4),
        highest=round(ratios[-1], 4),
        stacks=often("framework"),
        devices=often("device"),
    )
