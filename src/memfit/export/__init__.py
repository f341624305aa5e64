"""Plans written for the tools that people train with: one file a target.

A target turns a recipe into the configuration files of one tool. The plan is made for that tool's
own step (`_settle`), so that what is written fits there. What the tool has no key for and takes
memory or time alone is listed with a reason, on the screen, in JSON and at the head of each file;
what decides what is learned is refused. An axis of the mesh that the tool does not have is refused:
its file would start another number of ranks than were planned.
"""

from __future__ import annotations

from pathlib import Path

from memfit.core.callable_package import make_callable
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import installed_versions
from memfit.export.checking import find_check
from memfit.export.files import Head, render
from memfit.export.peak import planned
from memfit.export.settle import settle
from memfit.export.target import Export, find_target
from memfit.export.unwritten_keys import find_unwritten, find_unwritten_habits
from memfit.export.unwritten_keys import list_keys as list_keys
from memfit.export.ways_out import refuse_what_does_not_fit
from memfit.records import write_atomically
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Plan


def export(source: Plan | Request, target: str) -> Export:
    """A plan, or a request planned for it, as files of one tool.

    Raises UnknownName; InvalidRequest for a mesh that it has not, or what its files cannot say
    though it decides what is learned; DoesNotFit where the tool's own step does not fit.
    """
    found = find_target(target)
    job, draft, changed = settle(source, found)
    plan, recipe = job.plan, job.recipe
    refuse_what_does_not_fit(source, job, found)
    unwritten = find_unwritten(recipe, found.says_of(job)).items()  # but what the tool does anyhow
    left = {**{k: why for k, why in unwritten if k not in draft.becomes}, **draft.left}
    if "objective" in found.says and not found.schedules:
        left |= find_unwritten_habits(plan.request)
    peak = planned(plan)
    origin = source.recipe_digest if isinstance(source, Plan) else ""
    check = find_check(job, draft, found, left)
    head = Head(
        tool=f"{found.title} {found.version}".strip(),
        memfit=installed_versions(["memfit"])["memfit"],
        digest=plan.recipe_digest,
        origin="" if origin == plan.recipe_digest else origin,
        what=describe(recipe),
        peak=peak.words,
        left=left,
        changed=changed,
        needs=tuple(need.words for need in draft.needs),
        notes=draft.notes,
        start=draft.start,
    )
    return Export(
        target=target,
        version=found.version,
        recipe_digest=plan.recipe_digest,
        peak=peak,
        verdict=plan.memory.verdict,
        files={file.name: render(file, head) for file in draft.files},
        left_out=left,
        start=draft.start,
        changed=changed,
        needs=draft.needs,
        notes=draft.notes,
        check=check,
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
    step = "memfit's own step" if recipe.is_own else recipe.framework
    return f"{recipe.model.name}, {recipe.method}, on {devices}; planned as {step}"


make_callable(__name__)
