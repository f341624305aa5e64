"""Whose training step a recipe describes: one file a framework, memfit's own step among them.

memfit can neither run nor trace the steps of others, so each is a closed form read from the
framework's own source and held against published measurements (`memfit accuracy`). What a
framework's file does not describe it refuses; it never answers with another framework's numbers.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import ClassVar, NamedTuple

from msgspec import structs

from memfit.catalog.overheads import count_axes
from memfit.core.errors import InvalidRequest, MemoryUnknown, UnknownName, did_you_mean
from memfit.core.registry import Registry
from memfit.plan.step_time.arrays import Number, ceil_div
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.model import Model
from memfit.records.other_words import TRAINERS
from memfit.records.recipe import Option, Parallel, Recipe
from memfit.records.request import Request


class Knob(Record, frozen=True, kw_only=True):
    """A setting that only one framework has: `options: {NAME: value}` of a request."""

    default: Option
    means: str
    values: tuple[Option, ...] = ()  # the allowed ones; () any of the default's type


class Slack(Record, frozen=True, kw_only=True):
    """Reserved over allocated bytes at the peak: what the allocator holds but cannot use."""

    low: float
    typical: float
    high: float
    source: str  # where the band comes from; `fitted` names the corpus rows


class TimeTraits(Record, frozen=True, kw_only=True):
    """What a step does otherwise than others in what its time depends on (`plan.step_time`)."""

    fsdp2: bool = False  # weights are gathered and gradients reduced as `parallel` says, by torch
    counts_weights: bool = False  # trained weights and their update are counted one by one
    measured_launches: bool = False  # the user's own measurement of the host's launches applies
    casts_alone: bool = False  # casts to FP8 are kernels of their own
    allows_tf32: bool = True  # products of fp32 numbers run in TF32, as containers and scripts say
    narrow_gradients: bool = False  # gradients cross the network in 16 bits
    offloads_activations: bool = False  # `offload: activations` takes time, which is described
    selective_repeats: float = 0.0  # share that selective recomputing repeats; 0: as fitted
    products_repeated: float = 0.0  # share of products that selective recomputing repeats
    always_cuts_tokens: bool = False  # tp ranks cut tokens between products, asked or not
    torch_schedules: bool = False  # interleaved stages go in torch's rounds
    deals_by_cost: bool = False  # a stage with the embedding or the head has fewer blocks


NO_SLACK = Slack(low=1.0, typical=1.0, high=1.0, source="no bytes are described")


class Job(Record, frozen=True, kw_only=True):
    """One recipe of another framework, with everything that its closed form may ask."""

    model: Model  # as published: before adapters, all weights trainable, fp32
    recipe: Recipe
    device: Device

    def option(self, name: str) -> Option:
        """A knob of the framework's own, as the recipe says it."""
        return self.recipe.options[name]


class Rule(NamedTuple):
    """What a framework, or whoever searches, does not allow; of one recipe or of many."""

    name: str
    broken: Number  # a truth, or an array of them
    says: str  # why one recipe is refused; a template of `values`
    values: tuple[Number, ...] = ()
    hint: str = ""

    @property
    def sentence(self) -> str:
        """Why one recipe is refused."""
        return self.says.format(*self.values)


def divide(
    name: str, knob: str, parts: Number, what: str, whole: Number, *, hint: str = ""
) -> Rule:
    """Something is cut into equal parts: none may be left over, and nothing cannot be cut."""
    return Rule(
        name,
        (whole % parts != 0) | ((whole == 0) & (parts > 1)),
        "`{}` cuts the {} {} into {} parts",
        (knob, whole, what, parts),
        hint,
    )


@contextmanager
def hinting(framework: Framework) -> Iterator[None]:
    """Give a hint to a refusal of a step that memfit does not run, where it has none of its own."""
    try:
        yield
    except InvalidRequest as error:
        if framework.runs:
            raise
        error.hint = error.hint or (
            "`framework: memfit` plans memfit's own step; docs/frameworks.md lists what the steps"
            " of other frameworks are described for"
        )
        raise


def obey(rules: Iterable[Rule]) -> None:
    """Raise InvalidRequest for the first rule that one recipe breaks."""
    for rule in rules:
        if rule.broken:
            raise InvalidRequest(rule.sentence, hint=rule.hint)


class Split(NamedTuple):
    """A way to deal the blocks to a pipeline's stages."""

    pp: int
    virtual_pp: int
    longest: int  # blocks of the longest chunk
    tail: int  # fewest blocks of a stage's last chunk
    options: Mapping[str, Option] = {}


class Peaks(NamedTuple):
    """Bytes of many recipes at their largest instants; one element a recipe."""

    allocated: Number  # that hold tensors
    peak: Number  # with blocks that are reserved and cannot be used
    least: Number  # of them, those of the optimizer's step, which no recomputing lowers

    @classmethod
    def of(cls, ledgers: Sequence[Ledger]) -> Peaks:
        """Arrays from as many ledgers."""
        import numpy

        return cls(
            allocated=numpy.array([max(map(one.live, one.phases)) for one in ledgers]),
            peak=numpy.array([one.peak for one in ledgers]),
            least=numpy.array([one.total(Phase.OPTIMIZER_STEP) for one in ledgers]),
        )


class Framework(ABC):
    """What memfit knows of the training step of one framework; registered in `frameworks`."""

    name: ClassVar[str]  # of `framework:` in a request
    title: ClassVar[str]
    source: ClassVar[str]  # whose code was read, and which version
    # Values that the step has, of the shared knobs: precision, method, base_format, optimizer,
    # implementation, recompute, attention, loss, compile, offload. The first is what `auto` means.
    values: ClassVar[Mapping[str, tuple[str, ...]]]
    axes: ClassVar[tuple[str, ...]]  # names of `parallel` that may differ from their defaults
    knobs: ClassVar[Mapping[str, Knob]]
    runs: ClassVar[bool] = False  # memfit itself runs this step: it can be certified and trained
    simulated: ClassVar[bool] = False  # bytes come from a simulation, one recipe at a time
    time: ClassVar[TimeTraits] = TimeTraits()
    slack: ClassVar[Slack] = NO_SLACK
    memory_unknown: ClassVar[str] = ""  # why no bytes are described; "" where they are
    arrays: ClassVar[bool] = False  # whether `rules` and `measure` take many recipes at once
    pairs: ClassVar[bool] = False  # whether it is described how answers are compared, too
    samples: ClassVar[tuple[str, ...]] = ()  # objectives whose sampling is described, too
    recurrent: ClassVar[bool] = False  # whether it is described what linear attention holds, too
    recomputes_some: ClassVar[bool] = False  # blocks of each chunk, and not all or none alone
    zeros: ClassVar[tuple[int, ...]] = ()  # values of `parallel.zero` to choose from; () `cuts`
    cuts: ClassVar[int] = 3  # `zero` of a request that leaves `parallel` on auto

    ends: ClassVar[int] = (
        0  # pieces of a pipeline that may hold no block, only the embedding or head
    )

    def count_groups(self, parallel: Parallel) -> int:
        """Groups of ranks in which one process communicates: each takes memory of its own."""
        return count_axes(parallel)

    def rules(self, job: Job) -> list[Rule]:
        """What the sizes of the model, the mesh and the batch must be; job: of one recipe or many.

        `check` raises the first that is broken; a search leaves out what breaks any.
        """
        del job
        return []

    def list_splits(self, job: Job, ranks: Sequence[int]) -> list[Split]:
        """The pipelines that a search tries; ranks: the values of `parallel.pp` to choose from.

        job: without its mesh. What its options say of the split stays.
        """
        layers = job.model.architecture.layers
        return [
            Split(pp, chunks, ceil_div(layers, pp * chunks), layers // (pp * chunks))
            for pp in (ranks if "pp" in self.axes else (1,))
            for chunks in range(1, layers // pp + 1 if "virtual_pp" in self.axes and pp > 1 else 2)
            if pp * chunks <= layers
        ]

    def check(self, job: Job) -> None:
        """Raise InvalidRequest where values that are allowed one by one exclude each other.

        MemoryUnknown where they can be run, and it is only their bytes that are not described.
        """
        obey(self.rules(job))

    def predict(self, job: Job) -> Ledger:
        """Bytes that torch's allocator gives out on the fullest rank, at the peak of each phase.

        A phase's entries are what is alive at one instant: a peak is a maximum over instants.
        Blocks that are reserved but cannot be used at that instant are entries of kind
        `fragmentation`: they count for reserved memory, before `slack`, and not for allocated.
        Raises MemoryUnknown where the file describes the step for its time alone.
        """
        del job
        raise MemoryUnknown(
            f"memfit does not describe the memory of {self.title}: {self.memory_unknown}"
        )

    def choose_zeros(self, request: Request) -> tuple[int, ...]:
        """Values of `parallel.zero` for a request that leaves `parallel` on auto, the first of
        which one device has."""
        del request
        return (self.cuts, *(zero for zero in self.zeros if zero != self.cuts))

    def describe_open(self, recipe: Recipe) -> tuple[str, ...]:
        """What its own knobs became that are left on `auto`, in words."""
        del recipe
        return ()

    def doubt(self, recipe: Recipe) -> str:
        """Why a step that is predicted to fit is not known to; "" of all that is described."""
        del recipe
        return ""

    def waiting(self, job: Job) -> tuple[int, str]:
        """Bytes that the allocator holds beside the peak's, and why.

        They are reserved and not allocated, and it takes them back before it runs out of memory: no
        verdict counts them.
        """
        del job
        return 0, ""

    def on_host(self, job: Job) -> int:
        """Bytes that wait in the memory of all hosts: of `offload`."""
        del job
        return 0

    def measure(self, job: Job) -> Peaks:
        """Peaks of `predict` for many recipes: those of one whose numbers are arrays.

        The candidates passed `check`; what is not a number is the same for all. Where `arrays` is
        False, they are predicted one by one.
        """
        from memfit.plan.frameworks.shared.columns import pick, size_of

        recipes = (pick(job.recipe, row) for row in range(size_of(job.recipe)))
        ledgers = [self.predict(structs.replace(job, recipe=recipe)) for recipe in recipes]
        return Peaks.of(ledgers)


frameworks: Registry[Framework] = Registry("framework", "memfit.plan.frameworks")


@lru_cache(maxsize=256)  # step times ask of every recipe
def find_framework(name: str) -> Framework:
    """The framework of that name.

    Raises UnknownName with the nearest names, or with the one whose step a trainer's is.
    """
    module = name.replace("-", "_")
    if module.isidentifier() and find_spec(f"{__name__}.{module}") is not None:
        import_module(f"{__name__}.{module}")  # this one alone, not all of them
    try:
        return frameworks.find(name)
    except UnknownName as unknown:
        unknown.hint = TRAINERS.get(name.lower().replace("-", "_"), unknown.hint)
        raise


def resolve_options(framework: Framework, stated: Mapping[str, Option]) -> dict[str, Option]:
    """A value for every knob of the framework's own; raises InvalidRequest naming the wrong one.

    A version may be written as a number, which YAML makes of it.
    """
    found = dict(stated)
    for name, value in stated.items():
        knob = framework.knobs.get(name)
        if knob is None:
            near = did_you_mean(name, framework.knobs)
            known = ", ".join(framework.knobs) or "none"
            raise InvalidRequest(
                f"`options.{name}` is no knob of `{framework.name}`",
                hint=f"did you mean {near}?" if near else f"its own knobs: {known}",
            )
        kind = type(knob.default)
        if kind is str and not isinstance(value, bool) and str(value) in knob.values:
            found[name] = str(value)
            continue
        if knob.values:
            if any(one == value and type(one) is type(value) for one in knob.values):
                continue
            raise InvalidRequest(
                f"`options.{name}: {value}` is not a value of `{framework.name}`'s knob",
                hint=f"{knob.means}: {', '.join(map(str, knob.values))}",
            )
        right = isinstance(value, kind) or (kind is float and type(value) is int)
        if not right or isinstance(value, bool) != (kind is bool):
            raise InvalidRequest(
                f"`options.{name}: {value!r}` is not like its default, `{knob.default!r}`",
                hint=knob.means,
            )
    return {name: found.get(name, knob.default) for name, knob in framework.knobs.items()}


Instant = Mapping[tuple[Kind, str], tuple[int, str]]  # (kind, owner) -> bytes, because


def make_ledger(instants: Mapping[Phase, Instant]) -> Ledger:
    """A ledger from what is alive at each phase's peak; parts of 0 bytes are left out."""
    return Ledger(
        entries=tuple(
            Entry(kind=kind, phase=phase, owner=owner, nbytes=nbytes, because=because)
            for phase in Phase
            if phase in instants
            for (kind, owner), (nbytes, because) in instants[phase].items()
            if nbytes
        )
    )
