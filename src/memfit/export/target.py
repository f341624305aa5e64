"""One tool that plans are written for, and the files that it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from memfit.core.errors import InvalidRequest
from memfit.core.registry import Registry
from memfit.export.data import Data, read_data
from memfit.export.files import File
from memfit.export.needs import Need
from memfit.export.peak import Peak
from memfit.objectives import find_objective
from memfit.plan.request.assumed import is_estimated
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.model import Architecture, Model
from memfit.records.recipe import Parallel, Recipe
from memfit.records.results import Plan, Verdict


class Job(Record, frozen=True, kw_only=True):
    """What a target may ask: the plan, the model in numbers, and the device."""

    plan: Plan
    model: Model  # as published
    device: Device

    @property
    def architecture(self) -> Architecture:
        """The model in numbers."""
        return self.model.architecture

    @property
    def recipe(self) -> Recipe:
        """The recipe that is written."""
        return self.plan.recipe

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.recipe.parallel.world

    @property
    def per_node(self) -> int:
        """Devices of each machine."""
        return self.recipe.devices_per_node or self.world

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.world // self.per_node)

    @property
    def name(self) -> str:
        """Of the job: letters, digits and hyphens, as every scheduler takes them."""
        name = f"memfit-{self.recipe.model.name}".lower()
        return "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40].strip("-")

    @property
    def weights(self) -> str:
        """Where the model's weights are: a hub id or a folder."""
        reference = self.recipe.model
        return reference.source or reference.name

    @property
    def data(self) -> Data:
        """The training data: files of this machine, or a name on the hub."""
        return read_data(self.plan.request.task.data)

    @property
    def steps(self) -> int:
        """Optimizer steps; 0 where only an estimate of the data's tokens gives a number."""
        return 0 if is_estimated(self.plan.request.task) else self.recipe.steps

    @property
    def epochs(self) -> float | None:
        """Passes over the data; None where a number of steps is known."""
        return None if self.steps else self.plan.request.task.epochs or 1.0


class Draft(Record, frozen=True, kw_only=True):
    """What a target makes of a job: files, keys that they cannot say, and how to start."""

    files: tuple[File, ...]
    left: dict[str, str]  # key of the recipe -> why the files do not say it
    start: str  # the command that trains
    # keys of a recipe that the tool's own behaviour sets, whatever the plan has
    becomes: dict[str, Any] = {}  # noqa: RUF012 (msgspec gives each its own)
    needs: tuple[Need, ...] = ()  # packages that the files ask for
    notes: tuple[str, ...] = ()  # what to know before one starts


class Export(Record, frozen=True, kw_only=True):
    """A plan written for one tool."""

    schema: int = 1
    target: str
    version: str  # of the target that the files are for
    recipe_digest: str  # of the plan that is written
    peak: Peak
    verdict: Verdict
    files: dict[str, str]  # name -> content
    left_out: dict[str, str]  # key of the recipe -> why the target cannot say it
    start: str
    changed: dict[str, str] = {}  # noqa: RUF012 (key -> what it was, and is for this tool)
    needs: tuple[Need, ...] = ()
    notes: tuple[str, ...] = ()
    check: tuple[str, ...] = ()  # words of the command that reads the files back; () none does

    def __repr__(self) -> str:
        """Target, verdict and files in one line."""
        return f"<Export to {self.target} {self.version}, {self.verdict}: {', '.join(self.files)}>"


# of a scheduler, whose files start the plan's own trainer: it says them, or has them in its `left`
EVERY_KEY = frozenset(Recipe.__struct_fields__)


class Target(ABC):
    """One tool; registered in `exports`."""

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]  # that the files were parsed with
    # whose steps the tool trains with, the usual one first; () is the plan's own, of a scheduler
    frameworks: ClassVar[tuple[str, ...]] = ()
    says: ClassVar[frozenset[str]]  # keys of the recipe that the files say, or `left` explains
    # axes of `parallel` that the tool has; others are refused where they are more than 1
    axes: ClassVar[frozenset[str]]
    launches: ClassVar[bool] = False  # the file is a launcher's, and a script says the rest
    loads: ClassVar[bool] = False  # it always begins with a model's published weights
    reads_back: ClassVar[bool] = False  # `memfit check` reads its files

    @property
    def schedules(self) -> bool:
        """Whether it starts the plan's own trainer."""
        return not self.frameworks

    def says_of(self, job: Job) -> frozenset[str]:
        """`says` of a job's files: some are written of some jobs alone."""
        return self.says

    @abstractmethod
    def draft(self, job: Job) -> Draft:
        """The files of a job whose mesh `axes` allows."""


exports: Registry[Target] = Registry("target", "memfit.export.targets")


def find_target(name: str) -> Target:
    """The target of that name; raises UnknownName with the nearest names."""
    module = name.replace("-", "_")
    if module.isidentifier() and find_spec(f"memfit.export.targets.{module}") is not None:
        import_module(f"memfit.export.targets.{module}")  # this one alone, not all of them
    return exports.find(name)


def refuse_loss(recipe: Recipe, losses: Mapping[str, tuple[str, ...]], tool: str) -> None:
    """Raise InvalidRequest for a loss of pairs that a tool has not.

    losses: of each objective, the `preference.loss_type` that the tool's file can say.
    """
    objective, loss = recipe.objective, recipe.preference.loss_type
    if recipe.compares and loss not in losses.get(objective, ()):
        known = "; ".join(f"`objective: {o}` with {', '.join(n)}" for o, n in losses.items())
        raise InvalidRequest(
            f"`objective: {objective}` with `preference.loss_type: {loss}` cannot be written for"
            f" `{tool}`",
            hint=f"what is written for it is {known}; `memfit train` has it",
        )


def check_supported(objective: str, parallel: Parallel, target: Target) -> None:
    """Raise InvalidRequest for an objective, or an axis of the mesh, that the tool has not."""
    tokens = "preference" not in target.says and not (target.schedules or target.launches)
    if find_objective(objective).compares and tokens:
        raise InvalidRequest(
            f"`objective: {objective}` cannot be written for `{target.name}`, which trains on"
            " tokens alone",
            hint="trl, axolotl and llamafactory compare pairs, and so does `memfit train`, which"
            " slurm, k8s, … start elsewhere",
        )
    if find_objective(objective).samples and not (target.schedules or target.launches):
        raise InvalidRequest(
            f"`objective: {objective}` cannot be written for `{target.name}`: what memfit writes"
            " for other trainers has no rollouts",
            hint="`memfit train` samples answers, and slurm, k8s, … start it elsewhere",
        )
    plain = Parallel()
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "virtual_pp", "ep"):
        value = getattr(parallel, name)
        if name not in target.axes and value != getattr(plain, name):
            raise InvalidRequest(
                f"`parallel.{name}: {value}` cannot be written for `{target.name}`, whose axes are"
                f" {', '.join(sorted(target.axes)) or 'none: it runs on one device'}",
                hint="`memfit export --help` lists the targets",
            )
