"""Plans written for the tools that people train with: one file a target.

A target turns a recipe into the configuration files of one tool. What the tool has no key for is
listed with a reason, on the screen, in JSON and at the head of each file; it is never left out
silently. An axis of the mesh that the tool does not have is refused: its file would start another
number of ranks than were planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from memfit import families
from memfit.errors import InvalidRequest
from memfit.export._files import File, Head, render
from memfit.export._peak import Peak, predict_there
from memfit.hardware import Device
from memfit.libraries import installed_versions
from memfit.model import Architecture, Model
from memfit.nouns import Noun, to_data, write_atomically
from memfit.objectives import check_objective
from memfit.plan.frameworks import find_framework
from memfit.plan.problem import find_device
from memfit.recipe import ADAPTED, Recipe
from memfit.registry import Registry
from memfit.request import ParallelRequest
from memfit.results import Plan
from memfit.words import as_yaml

# who made the recipe and what for: at the head of every file
OF_PAIRS = ("compares", "fp32_outputs")  # options without an effect on other objectives
HEAD = ("schema", "framework", "device", "devices_per_node", "network")
# values of keys without a default that every tool has where nothing is said
PLAIN: dict[str, object] = {"loss": "plain", "loss_chunk": 0}


class Job(Noun, frozen=True, kw_only=True):
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
    def own(self) -> bool:
        """Whether it is memfit's own step that was planned."""
        return self.recipe.framework == "memfit"

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
        said = f"memfit-{self.recipe.model.name}".lower()
        return "".join(c if c.isalnum() else "-" for c in said)[:40].strip("-")

    @property
    def weights(self) -> str:
        """Where the model's weights are: a hub id or a folder."""
        reference = self.recipe.model
        return reference.source or reference.name

    @property
    def data(self) -> str:
        """The training data as the request names it; a placeholder where it names none."""
        return self.plan.request.task.data or "YOUR_DATASET"


class Draft(Noun, frozen=True, kw_only=True):
    """What a target makes of a job: files, keys that they cannot say, and how to start."""

    files: tuple[File, ...]
    left: dict[str, str]  # key of the recipe -> why the files do not say it
    start: str  # the command that trains
    # keys of a request that the tool's own behaviour sets, where it is not the framework's default
    becomes: dict[str, Any] = {}  # noqa: RUF012 (msgspec gives each its own)


class Export(Noun, frozen=True, kw_only=True):
    """A plan written for one tool."""

    schema: int = 1
    target: str
    version: str  # of the target that the files are for
    recipe_digest: str
    peak: Peak
    files: dict[str, str]  # name -> content
    left_out: dict[str, str]  # key of the recipe -> why the target cannot say it
    start: str


# of a scheduler, whose files start the plan's own trainer: it says them, or has them in its `left`
EVERY_KEY = frozenset(Recipe.__struct_fields__)


class Target(ABC):
    """One tool; registered in `exports`."""

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]  # that the files were parsed with
    framework: ClassVar[str] = ""  # whose step it is to memfit; "" where none is described
    unknown: ClassVar[str] = ""  # why none is
    says: ClassVar[frozenset[str]]  # keys of the recipe that the files say, or `left` explains
    # axes of `parallel` that the tool has; others are refused where they are more than 1
    axes: ClassVar[frozenset[str]]

    def says_of(self, job: Job) -> frozenset[str]:
        """`says` of a job's files: some are written of some jobs alone."""
        return self.says

    @abstractmethod
    def draft(self, job: Job) -> Draft:
        """The files of a job whose mesh `axes` allows."""

    def find_peak(self, job: Job, draft: Draft) -> Peak:
        """Of one device under the target's own step."""
        left = frozenset(draft.left)
        return predict_there(job.plan, self.framework, self.unknown, left, draft.becomes)


exports: Registry[Target] = Registry("target", "memfit.export")


def find_target(name: str) -> Target:
    """The target of that name; raises UnknownName with the nearest names."""
    module = name.replace("-", "_")
    if module.isidentifier() and find_spec(f"{__name__}.{module}") is not None:
        import_module(f"{__name__}.{module}")  # this one alone, not all of them
    return exports.find(name)


def export(plan: Plan, target: str) -> Export:
    """A plan as files of one tool; raises UnknownName, and InvalidRequest for a mesh it has not."""
    found = find_target(target)
    recipe = plan.recipe
    _check_axes(recipe, found)
    _check_objective(recipe, found)
    job = Job(
        plan=plan,
        model=families.read_model(recipe.model),
        device=find_device(recipe.device),
    )
    draft = found.draft(job)
    left = {**find_unsaid(recipe, found.says_of(job)), **draft.left}
    peak = found.find_peak(job, msgspec.structs.replace(draft, left=left))
    head = Head(
        tool=f"{found.title} {found.version}".strip(),
        memfit=installed_versions(["memfit"])["memfit"],
        digest=plan.recipe_digest,
        what=describe(recipe),
        peak=peak.words,
        left=left,
        start=draft.start,
    )
    return Export(
        target=target,
        version=found.version,
        recipe_digest=plan.recipe_digest,
        peak=peak,
        files={file.name: render(file, head) for file in draft.files},
        left_out=left,
        start=draft.start,
    )


def write_export(made: Export, folder: Path) -> list[Path]:
    """Each file whole or not at all; returns their paths.

    Raises InvalidRequest before anything is written where a file there is not memfit's.
    """
    paths = [folder / name for name in made.files]
    for path in paths:
        if path.exists() and b"memfit" not in path.read_bytes():
            raise InvalidRequest(
                f"`{path}` is there, and memfit has not written it",
                hint="name another folder with `--out`, or move the file",
            )
    for path, content in zip(paths, made.files.values(), strict=True):
        write_atomically(path, content.encode())
    return paths


def describe(recipe: Recipe) -> str:
    """The recipe's subject in a line: model, method, devices, whose step was planned."""
    world = recipe.parallel.world
    devices = recipe.device if world == 1 else f"{world} x {recipe.device}"
    step = "memfit's own step" if recipe.framework == "memfit" else recipe.framework
    return f"{recipe.model.name}, {recipe.method}, on {devices}; planned as {step}"


def find_unsaid(recipe: Recipe, says: frozenset[str]) -> dict[str, str]:
    """Keys that count in this recipe and that a target has no place for."""
    return {
        key: f"{as_yaml(value)}: no key for it"
        for key, value in list_keys(recipe)
        if key not in says and not any(key.startswith(f"{group}.") for group in says)
    }


def list_keys(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Dotted keys with values that this recipe's step depends on; what is plain is left out."""
    plain = to_data(msgspec.structs.replace(recipe, **_defaults()))
    for name, value in to_data(recipe).items():
        if name in HEAD or (name == "model") or PLAIN.get(name) == value:
            continue
        if name == "recompute" or (name == "base_format" and recipe.method == "full"):
            continue  # `recompute_blocks` says it; no weight is frozen
        if not isinstance(value, dict):
            if name not in _defaults() or value != plain[name]:
                yield name, value
            continue
        for key, inner in value.items():
            if _counts(recipe, name, key, inner):
                yield f"{name}.{key}", inner


def _defaults() -> dict[str, object]:
    """Keys of a recipe that have a default."""
    return {
        field.name: field.default
        for field in msgspec.structs.fields(Recipe)
        if field.default is not msgspec.NODEFAULT
    }


def _counts(recipe: Recipe, group: str, key: str, value: object) -> bool:
    """Whether a nested key has an effect."""
    if group == "lora":
        return recipe.method in ADAPTED and value not in (0, 0.0, "plain")
    if group == "freeze":
        return recipe.method == group and value not in (0, [], ())
    if group == "preference":
        return recipe.prefers and value not in (0, 0.0)
    if group == "parallel":
        plain = getattr(ParallelRequest(), key, None)
        return key not in ("dp_replicate", "dp_shard") and value != plain
    if group == "options" and key in OF_PAIRS and not recipe.prefers:
        return False
    if group == "options":
        knob = find_framework(recipe.framework).knobs.get(key)
        return knob is None or value != knob.default
    if group == "optimizer" and key == "momentum":
        return recipe.optimizer.name == "sgd"
    if group == "optimizer" and key in ("beta1", "beta2", "eps"):
        return recipe.optimizer.name != "sgd"
    plain = _plain(getattr(recipe, group), key)
    return value != (0 if key == "warmup_steps" else plain)


def _plain(noun: Noun, key: str) -> object:
    """The default of a nested key; NODEFAULT where it has none, and always counts."""
    fields = {field.name: field.default for field in msgspec.structs.fields(noun)}
    return fields[key]


def _check_objective(recipe: Recipe, target: Target) -> None:
    """Files that would train on something else than was planned are not written."""
    if not recipe.prefers:
        return
    check_objective(recipe)
    if "objective" in target.says and "preference" not in target.says and target.says != EVERY_KEY:
        raise InvalidRequest(
            f"`objective: dpo` cannot be written for `{target.name}`, which trains on tokens alone",
            hint="trl, axolotl and llamafactory compare pairs, and so does `memfit train`, which"
            " slurm, k8s, … start elsewhere",
        )


def _check_axes(recipe: Recipe, target: Target) -> None:
    plain = ParallelRequest()
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "virtual_pp", "ep"):
        value = getattr(recipe.parallel, name)
        if name not in target.axes and value != getattr(plain, name):
            raise InvalidRequest(
                f"`parallel.{name}: {value}` cannot be written for `{target.name}`, whose axes are"
                f" {', '.join(sorted(target.axes)) or 'none: it runs on one device'}",
                hint="`memfit export --help` lists the targets",
            )
