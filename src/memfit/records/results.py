"""What the verbs return: Plan, Certificate, Run, Report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from memfit.core import units
from memfit.core.notebook import describe_bytes, draw_result, draw_tables
from memfit.core.wording import VERDICTS
from memfit.records import Record
from memfit.records.ledger import Entry, Kind, Ledger, sum_by_kind
from memfit.records.recipe import Recipe
from memfit.records.reinforcement.phase_time import PhaseTime
from memfit.records.request import Request
from memfit.records.shapes import RowBounds
from memfit.records.tables import Rows, Tabled
from memfit.records.timeline import Timeline

SHOWN = 12  # tensors that a notebook shows
Verdict = Literal["fits", "at_risk", "does_not_fit", "unproven"]


class Memory(Record, frozen=True, kw_only=True):
    """The three memory numbers of the fullest rank, in bytes; None is unknown."""

    peak_allocated: int | None  # live tensors (CPU) or the caching allocator's blocks (CUDA)
    peak_reserved: int | None
    # reserved + context, as the driver shows it; on a CPU the anonymous pages of the process
    device_total: int | None
    total_low: int | None = None  # the band around `device_total`: it takes at least this
    total_high: int | None = None  # and at most this; `fits` means that this fits
    usable: int | None  # the limit asked for, or what the device has
    verdict: Verdict
    because: str
    peak_phase: str
    entries: tuple[Entry, ...]

    @property
    def needed(self) -> int | None:
        """The bytes that are held against the usable line; None is unknown.

        Without a context on record those that are reserved: what is needed at least.
        """
        known = (self.device_total, self.peak_reserved, self.peak_allocated)
        return next((nbytes for nbytes in known if nbytes is not None), None)

    @property
    def is_within(self) -> bool:
        """Whether the whole range is usable, proven or not: no recipe has to change."""
        high, usable = self.total_high, self.usable
        within = high is not None and usable is not None and high <= usable
        return self.verdict == "fits" or (self.verdict == "unproven" and within)

    def draw(self, subject: str, tables: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> str:
        """HTML of the verdict, the bar and tables, for a notebook."""
        kinds = {kind.value: n for kind, n in sum_by_kind(self.entries).items()}
        return draw_result(
            self.verdict, subject, self.needed, self.usable, (self.total_low, self.total_high),
            kinds, tables,
        )  # fmt: skip


class Time(Record, frozen=True, kw_only=True):
    """One optimizer step, predicted or measured; None is unknown.

    Of sampled answers a step is an iteration: its rollout, scoring and updates.
    """

    step_seconds: float | None
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    mfu: float | None  # model FLOP/s over the device's dense peak; recompute not counted
    hfu: float | None  # the same with recompute counted
    model_flops_per_step: float
    total_seconds: float | None  # of all the steps asked for
    because: str
    basis: str = ""  # whose figures of the device the seconds rest on; "" while there are none
    step_seconds_low: float | None = None  # of a prediction: the range to expect, and why so wide
    step_seconds_high: float | None = None
    range_because: str = ""
    phases: tuple[PhaseTime, ...] = ()  # of an iteration of reinforcement learning, in its order


class Cost(Record, frozen=True, kw_only=True):
    """Cost of all the request's steps on all devices; None without a time, price, power or grid."""

    device_hours: float | None
    usd: float | None
    kwh: float | None
    kg_co2: float | None = None  # CO2 equivalents
    because: str


class Considered(Record, frozen=True, kw_only=True):
    """One recipe of the search: what it needs, and why it was chosen or lost."""

    label: str
    changes: dict[str, Any]  # key of the request -> value, as `--set` takes them
    peak_allocated: int
    device_total: int | None
    exact: bool  # predicted in full; else estimated for the search, within a few per cent
    relative_time: float  # step time over the chosen recipe's
    fits: bool
    chosen: bool
    because: str
    mesh: str = ""  # of a lever whose plan cuts the model otherwise: how, in words


class WayOut(Record, frozen=True, kw_only=True):
    """One change under which a request that does not fit does, found by planning it with that."""

    # what the change is about; knobs: those that the request states are left to the planner
    kind: Literal["knobs", "offload", "method", "rows", "limit", "devices", "device"]
    title: str  # for a person: `LoRA over a base in nf4`, `4 x h100-sxm`
    changes: dict[str, Any]  # key of the request -> value; all of them together
    options: tuple[str, ...]  # the same as one types them after the command, one word an element
    label: str  # the recipe of that plan in one line
    peak_allocated: int  # bytes
    device_total: int | None  # bytes of the fullest device; None on a CPU
    usable: int | None
    devices: int
    step_seconds: float | None  # None is unknown
    total_seconds: float | None
    usd: float | None  # of all steps
    exact: bool  # what is learned stays the same: only devices differ
    because: str


class Traffic(Record, frozen=True, kw_only=True):
    """Bytes that the fullest rank sends in one optimizer step by one collective of one mesh axis.

    As many arrive. A ring is assumed: of a message of n bytes among r ranks, each rank sends
    (r - 1) / r x n in an all_gather or a reduce_scatter, and twice that in an all_reduce.
    """

    axis: str  # dp_replicate, dp_shard, tp, cp, pp
    collective: str  # all_gather, reduce_scatter, all_reduce, send_recv
    ranks: int
    nbytes: int
    because: str


class Plan(Tabled, frozen=True, kw_only=True):
    """A request decided: the recipe, what it will take, and what was rejected and why."""

    schema: int = 1
    recipe_digest: str
    request: Request
    recipe: Recipe
    memory: Memory
    time: Time
    cost: Cost
    ledger: Ledger
    timeline: Timeline
    considered: tuple[Considered, ...]  # runners-up, fastest first
    levers: tuple[Considered, ...]  # the chosen recipe with one knob changed
    assumptions: tuple[str, ...]
    versions: dict[str, str]
    ways_out: tuple[WayOut, ...] = ()  # of a plan that does not fit: the cheapest first
    traffic: tuple[Traffic, ...] = ()  # what the ranks of a mesh send each other; () of one device
    # bytes in the memory of all hosts, by what takes them; they are in no verdict
    host: dict[str, int] = {}  # noqa: RUF012 (msgspec gives each its own)

    def tables(self) -> Mapping[str, Rows]:
        """See `Tabled`."""
        return {
            "memory": self.memory.entries, "levers": self.levers, "considered": self.considered,
            "ways_out": self.ways_out, "traffic": self.traffic,
        }  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether all of its range is usable: the verdict FITS, neither TIGHT nor UNPROVEN."""
        return self.memory.verdict == "fits"

    @property
    def chosen(self) -> Considered | None:
        """The recipe's own row among those considered; None where nothing was searched."""
        return next((row for row in self.considered if row.chosen), None)

    @property
    def label(self) -> str:
        """The recipe in one line; "" where nothing was searched."""
        return self.chosen.label if self.chosen else ""

    def __repr__(self) -> str:
        """Verdict, model, device, bytes and seconds in one line."""
        recipe, step = self.recipe, self.time.step_seconds
        took = "" if step is None else f", {units.show_seconds(step)} a step"
        return (
            f"<Plan {VERDICTS[self.memory.verdict]} {recipe.model.name} on {recipe.placed_on}:"
            f" {describe_bytes(self.memory.needed, self.memory.usable)}, {recipe.method}"
            f" {recipe.precision}{took}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        time, cost, steps = self.time, self.cost, self.recipe.steps
        figures = [
            ("one step", time.step_seconds, units.show_seconds),
            (f"all {steps:,} steps", time.total_seconds, units.show_seconds),
            ("tokens/s", time.tokens_per_second, lambda n: f"{n:,.0f}"),
            ("USD", cost.usd, lambda n: f"{n:,.2f}"),
        ]
        known = [(what, show(value)) for what, value, show in figures if value is not None]
        ways = [
            (" ".join(way.options), units.show_bytes(way.device_total or way.peak_allocated),
             way.title)
            for way in self.ways_out
        ]  # fmt: skip
        tables = (
            ("Time and cost (predicted)", known),
            ("Ways out", ways),
            ("Assumed", [(line,) for line in self.assumptions]),
        )
        return self.memory.draw(f"{self.recipe.model.name} on {self.recipe.placed_on}", tables)


class Tensor(Record, frozen=True, kw_only=True):
    """One tensor alive at a peak, or `count` of them that differ in their block alone."""

    nbytes: int  # of one
    count: int = 1
    kind: str
    module: str  # path of the module (or parameter); `*` for the blocks' indices of several
    op: str
    shape: tuple[int, ...] = ()  # of the first tensor on the storage; () inside a kernel
    dtype: str = ""
    source: str = ""  # file:line outside torch that asked for it; of a backward, its forward's

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.nbytes * self.count


_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def without_index(module: str) -> str:
    """The path with its blocks' indices as `*`, so that blocks alike have one name."""
    return _INDEX.sub("*", module)


def group_tensors(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors that differ in their block alone as one row, the most bytes first."""
    groups: dict[Tensor, list[Tensor]] = {}
    for tensor in tensors:
        alike = msgspec.structs.replace(tensor, module=without_index(tensor.module), count=1)
        groups.setdefault(alike, []).append(tensor)
    rows = []
    for alike, group in groups.items():
        paths = {tensor.module for tensor in group}
        module = paths.pop() if len(paths) == 1 else alike.module
        count = sum(tensor.count for tensor in group)
        rows.append(msgspec.structs.replace(alike, module=module, count=count))
    return tuple(sorted(rows, key=lambda row: -row.total))


class Certificate(Tabled, frozen=True, kw_only=True):
    """The trainer's own step, run on fake tensors: what it will hold, to the byte."""

    schema: int = 1
    recipe_digest: str
    recipe: Recipe
    device: str
    memory: Memory
    phases: dict[str, int]  # peak_allocated of each phase
    ledger: Ledger
    at_peak: tuple[Tensor, ...]  # all tensors alive at the peak, those alike in one row
    bounds: tuple[str, ...]  # what was assumed about data
    seconds: float  # taken to certify
    versions: dict[str, str]
    generation: Memory | None = None  # of `memfit generate`, a process of its own after the run
    data: RowBounds | None = None  # within which training data must stay
    held_out: RowBounds | None = None  # and what is evaluated on
    # bytes of host tensors while a run on a GPU loads and saves; they are in none of the phases
    host: dict[str, int] = {}  # noqa: RUF012 (msgspec gives each its own)
    from_cache: bool = False  # made before, of the same recipe, limit, versions and device
    # of a pipeline's places that were traced, each one's `phases`; a place between two of them
    # holds no more than the one before it. Empty where one rank alone was traced
    stages: dict[str, dict[str, int]] = {}  # noqa: RUF012 (as above)

    @property
    def fits(self) -> bool:
        """Whether all of its range is usable: the verdict FITS, neither TIGHT nor UNPROVEN."""
        return self.memory.verdict == "fits"

    def phases_at(self, place: int) -> dict[str, int]:
        """Peaks that hold for the ranks of one place of a pipeline: its own, where its stage was
        traced; of another stage's certificate the peak of the whole run alone holds."""
        if self.recipe.parallel.pp == 1:
            return self.phases
        if not self.stages:
            return dict.fromkeys(self.phases, max(self.phases.values()))
        return self.stages[str(max(known for known in map(int, self.stages) if known <= place))]

    def tables(self) -> Mapping[str, Rows]:
        """See `Tabled`."""
        phases = [{"phase": phase, "peak_allocated": n} for phase, n in self.phases.items()]
        return {"memory": self.memory.entries, "tensors": self.at_peak, "phases": phases}

    def __repr__(self) -> str:
        """Verdict, model, device and bytes in one line."""
        return (
            f"<Certificate {VERDICTS[self.memory.verdict]} {self.recipe.model.name} on"
            f" {self.recipe.placed_on}: {describe_bytes(self.memory.needed, self.memory.usable)}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        largest = [
            (units.show_bytes(t.total), f"{t.count} x" if t.count > 1 else "", t.kind,
             f"{t.module} {t.op}")
            for t in self.at_peak[:SHOWN]
        ]  # fmt: skip
        phases = [(phase, units.show_bytes(n)) for phase, n in self.phases.items()]
        tables = (("Peak of each phase", phases), ("Largest tensors at the peak", largest))
        subject = f"{self.recipe.model.name} on {self.recipe.placed_on}, certified"
        return self.memory.draw(subject, tables)


class Lever(Record, frozen=True, kw_only=True):
    """A certified recipe with one knob turned, certified too; None where it could not be."""

    changes: dict[str, Any]  # key of the request -> value, as `--set` takes them
    peak_allocated: int | None
    device_total: int | None
    removed: int | None  # bytes that the allocated peak loses; negative: it grows
    verdict: Verdict | None
    exact: bool  # what is learned stays the same
    because: str


class Nearest(Record, frozen=True, kw_only=True):
    """The certified recipe nearest to one that does not fit; `memory.verdict` says if it does."""

    changes: dict[str, Any]  # what to set in the request to get exactly this recipe; {} is itself
    recipe_digest: str
    memory: Memory
    relative_time: float  # predicted step time over the asked recipe's
    exact: bool  # what is learned stays the same


class Change(Record, frozen=True, kw_only=True):
    """Bytes of one thing in two certificates; None where one does not have it."""

    name: str
    a: int | None
    b: int | None

    @property
    def difference(self) -> int | None:
        """b - a, where something that is not there counts nothing; None without both."""
        if self.a is None and self.b is None:
            return None
        return (self.b or 0) - (self.a or 0)


class Side(Record, frozen=True, kw_only=True):
    """One of two certificates that are compared."""

    name: str
    recipe_digest: str
    model: str
    device: str
    verdict: Verdict
    peak_phase: str


class Diff(Record, frozen=True, kw_only=True):
    """What one certificate has otherwise than another."""

    schema: int = 1
    a: Side
    b: Side
    recipe: dict[str, tuple[Any, Any]]  # dotted key -> (old, new), of those that differ
    versions: dict[str, tuple[str | None, str | None]]  # the same of libraries
    numbers: tuple[Change, ...]  # the three memory numbers and the limit
    phases: tuple[Change, ...]  # the peak of each phase
    components: tuple[Change, ...]  # `phase/kind` at that phase's own peak
    modules: tuple[Change, ...]  # at the largest peak, blocks' indices as `*`
    appeared: tuple[Tensor, ...]  # at B's peak and not, or not so many, at A's
    disappeared: tuple[Tensor, ...]


class Measurement(Record, frozen=True, kw_only=True):
    """One measured value and which counter gave it."""

    value: float
    unit: str
    counter: str
    n: int = 1
    spread: float = 0.0


class Answer(Record, frozen=True, kw_only=True):
    """One sampled answer, as the log of a run has it."""

    step: int
    prompt: str
    completion: str
    reward: float | None  # None: no function could judge it


class Run(Record, frozen=True, kw_only=True):
    """What happened: counters, losses, environment."""

    schema: int = 1
    recipe_digest: str
    recipe: Recipe
    measurements: dict[str, Measurement]
    phases: dict[str, int]  # measured peak of each phase, bytes
    ledger: Ledger
    losses: tuple[tuple[int, float], ...]  # (step, training loss)
    evaluations: tuple[tuple[int, float], ...]
    steps_done: int
    finished: bool
    environment: dict[str, str]
    ranks: tuple[dict[str, int], ...] = ()  # of many: each one's `phases`; what is above is of the
    # one that is certified
    warnings: tuple[str, ...] = ()  # such as a measured peak above the certified one
    rewards: tuple[tuple[int, float], ...] = ()  # (step, mean reward of the sampled answers)
    divergences: tuple[tuple[int, float], ...] = ()  # (step, nats a token from the reference)
    value_losses: tuple[tuple[int, float], ...] = ()  # (step, loss of PPO's values)
    answers: tuple[Answer, ...] = ()  # of the first rollout and of the last one
    continued: tuple[str, ...] = ()  # each time that it went on beyond its end: how
    ended_early: str = ""  # who ended it before its last step, and why; "" where nobody did

    @property
    def state(self) -> str:
        """Whether it is finished, and why so early where it is."""
        if not self.finished:
            return "not finished"
        return f"finished early: {self.ended_early}" if self.ended_early else "finished"

    def __repr__(self) -> str:
        """Steps, the last loss and the model in one line."""
        loss = f", loss {self.losses[-1][1]:.4g}" if self.losses else ""
        done = "finished" if self.finished else "stopped"
        return f"<Run {self.recipe.model.name}: {done} after {self.steps_done} steps{loss}>"


class Excess(Record, frozen=True, kw_only=True):
    """What one component held beside what was certified for the same phase, bytes."""

    kind: Kind
    owner: str
    held: int
    certified: int
    because: str = ""  # of what was held

    @property
    def excess(self) -> int:
        """Bytes above the certified ones; negative below them."""
        return self.held - self.certified


class OutOfMemory(Record, frozen=True, kw_only=True):
    """out_of_memory.json: what was alive when memory ran out, against the certificate."""

    schema: int = 1
    recipe_digest: str
    where: str  # the rehearsal, or a step
    phase: str
    message: str  # the allocator's own first line
    complete: bool  # whether every tensor was counted; else only those that Python reaches
    held: int  # bytes of what was counted
    certified: int | None  # the phase's certified peak
    components: tuple[Excess, ...]  # the largest excess first
    tensors: tuple[Tensor, ...]  # the largest of components above their certificate
    checkpoint: str  # the newest complete one; "" when there is none
    snapshot: str  # of torch's CUDA allocator, for PyTorch's memory viewer; "" on a CPU


class Merged(Record, frozen=True, kw_only=True):
    """What `memfit merge` wrote, and how exact it is."""

    schema: int = 1
    folder: str
    base: str
    weights: int  # that the adapter changed
    nbytes: int  # of all weights
    dtypes: tuple[str, ...]  # of the changed ones, as safetensors name them
    lost: float  # of the adapter's change, what rounding to the dtype lost: norm over norm
    # how far the base's files are from what the adapter was trained on, norm over norm; None where
    # no run says it
    base_differs: float | None


class Comparison(Record, frozen=True, kw_only=True):
    """One quantity, three sources; errors are signed fractions of the later source."""

    name: str
    unit: str
    predicted: float | None
    certified: float | None
    measured: float | None
    error_predicted: float | None  # predicted / (certified or measured) - 1
    error_certified: float | None  # certified / measured - 1


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


class Report(Tabled, frozen=True, kw_only=True):
    """predicted ⋈ certified ⋈ measured, on the recipe's digest."""

    schema: int = 1
    recipe_digest: str
    title: str
    comparisons: tuple[Comparison, ...]
    plan: Plan
    certificate: Certificate | None
    run: Run | None
    sample: str
    refused: str = ""  # why measured seconds are none, and not compared

    def tables(self) -> Mapping[str, Rows]:
        """See `Tabled`."""
        return {"comparisons": self.comparisons}

    def _repr_html_(self) -> str:
        """What a notebook shows: the three numbers of each quantity."""
        rows = [
            (c.name, c.unit, *(_show(n) for n in (c.predicted, c.certified, c.measured)))
            for c in self.comparisons
        ]
        head = ("", "unit", "predicted", "certified", "measured")
        return draw_tables(((self.title, [head, *rows]),))

    def __repr__(self) -> str:
        """What it is of, in one line."""
        return f"<Report {self.title}: {self.plan!r}>"
