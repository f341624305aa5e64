"""plan, predict, certify."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import (
    Changes,
    anyway_option,
    folder_option,
    note,
    output_options,
    print_json,
    read_target,
    request_options,
    same_options,
    why_option,
)
from memfit.errors import DoesNotFit, InvalidRequest

if TYPE_CHECKING:
    from memfit.results import Certificate, Plan


@click.command("plan", short_help="Decide every knob left on `auto` under the limits.")
@click.argument("target", metavar="[MODEL|REQUEST.YAML]", required=False)
@request_options
@folder_option
@why_option
@output_options
def plan_command(
    target: str | None,
    device: str | None,
    memory: str | None,
    changes: Changes,
    folder: Path | None,
    why: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Decide every knob left on `auto` under the limits; exit 3 when nothing fits.

    MODEL is a catalogue name, a hub id, or a folder with config.json; without it request.yaml of
    this folder is read.
    """
    from memfit import api

    target = target or _request_here()
    plan = api.plan(read_target(target, device, memory, changes))
    if folder:
        api.write_plan(plan, folder)
        note(quiet)(f"wrote {folder / 'plan.json'}")
    return _finish(plan, as_json, why, _after_plan(plan, target, device, memory, changes, folder))


def _request_here() -> str:
    if Path("request.yaml").exists():
        return "request.yaml"
    raise InvalidRequest(
        "no model was named, and there is no request.yaml here",
        hint="`memfit plan llama-3.1-8b --device h100-sxm`, or `memfit init` to write one",
    )


def _finish(plan: Plan, as_json: bool, why: bool, commands: list[str]) -> int:
    if as_json:
        print_json(plan)
    else:
        from memfit.screens.layout import make_console
        from memfit.screens.plan import show_plan

        show_plan(make_console(), plan, commands=commands, why=why)
    return _exit_code(plan.memory.verdict)


def _exit_code(verdict: str) -> int:
    return DoesNotFit.exit_code if verdict == "does_not_fit" else 0


def _after_plan(
    plan: Plan, target: str, device: str | None, memory: str | None, changes: Changes,
    folder: Path | None,
) -> list[str]:  # fmt: skip
    """What one would type next: make it fit, prove it, or train."""
    options = same_options(device, memory, changes)
    again = f"{shlex.quote(target)}{options}"
    if plan.memory.verdict == "does_not_fit":
        helping = [lever for lever in plan.levers if lever.fits]
        if not helping:
            return [f"memfit plan {again} --why"]
        from memfit.screens.plan import set_options

        best = min(helping, key=lambda lever: lever.relative_time)
        words = " ".join(f"--set {word}" for word in set_options(best.changes, plan))
        return [f"memfit plan {again} {words}"]
    if folder:
        return [f"memfit certify {shlex.quote(str(folder / 'plan.json'))}"]
    commands = [f"memfit certify {again}"]
    if plan.request.task.data:
        commands.append(f"memfit train {again}")
    return commands


@click.command("predict", short_help="Memory and time of one stated configuration.")
@click.argument("target", metavar="RECIPE.YAML")
@request_options
@why_option
@output_options
def predict_command(
    target: str,
    device: str | None,
    memory: str | None,
    changes: Changes,
    why: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Memory and time of one fully stated configuration, without a search."""
    from memfit import api

    del quiet
    plan = api.predict(read_target(target, device, memory, changes))
    return _finish(plan, as_json, why, _after_plan(plan, target, device, memory, changes, None))


@click.command("certify", short_help="Prove a plan with the trainer's own step on fake tensors.")
@click.argument("target", metavar="PLAN.JSON|REQUEST.YAML|MODEL")
@request_options
@folder_option
@anyway_option
@why_option
@output_options
def certify_command(
    target: str,
    device: str | None,
    memory: str | None,
    changes: Changes,
    folder: Path | None,
    anyway: bool,
    why: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prove a plan: run the trainer's own step on fake tensors of the target device.

    Needs no accelerator. Writes certificate.json beside plan.json, or into --folder.
    """
    from memfit import api

    say = note(quiet)
    plan, home = _plan_of(target, device, memory, changes, folder)
    if plan.memory.verdict == "does_not_fit" and not anyway:
        say("the plan does not fit, so there is nothing to certify; --anyway certifies it")
        return _finish(plan, as_json, why, _after_plan(plan, target, device, memory, changes, None))
    say(f"certifying recipe {plan.recipe_digest} for {plan.recipe.device}")
    certificate = api.certify(plan.recipe, usable=plan.memory.usable)
    if home:
        api.write_plan(plan, home)
        api.write_certificate(certificate, home)
        say(f"wrote {home / 'certificate.json'}")
    commands = _after_certificate(certificate, plan, home)
    if as_json:
        print_json(_with_time(certificate, plan))
    else:
        from memfit.screens.certificate import show_certificate
        from memfit.screens.layout import make_console

        show_certificate(make_console(), certificate, plan, commands=commands, why=why)
    return _exit_code(certificate.memory.verdict)


def _plan_of(
    target: str, device: str | None, memory: str | None, changes: Changes, folder: Path | None
) -> tuple[Plan, Path | None]:
    """The plan of a plan.json as it stands, or of a request; and the folder that it belongs to."""
    from memfit import api

    path = Path(target)
    request = read_target(target, device, memory, changes)
    if path.suffix == ".json" and path.name != "config.json" and api.is_plan(path):
        return api.read_plan(path), folder or path.parent
    return api.plan(request), folder


def _with_time(certificate: Certificate, plan: Plan) -> dict[str, Any]:
    """A certificate proves memory; its time and cost are the plan's predictions."""
    from memfit.nouns import to_data

    return {**to_data(certificate), "time": to_data(plan.time), "cost": to_data(plan.cost)}


def _after_certificate(certificate: Certificate, plan: Plan, home: Path | None) -> list[str]:
    if certificate.memory.verdict == "does_not_fit" or not home:
        return []
    file = shlex.quote(str(home / "plan.json"))
    if not plan.request.task.data:
        return ["memfit train request.yaml   # with `task.data:` set, to train for real"]
    return [f"memfit train {file}"]
