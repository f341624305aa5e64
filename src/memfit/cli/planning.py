"""plan, predict, certify, diff."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memfit.cli.first_contact import ask_three, can_ask
from memfit.cli.options import (
    Changes,
    anyway_option,
    changed_options,
    folder_option,
    full_trace_option,
    no_cache_option,
    note,
    output_options,
    print_json,
    read_changes,
    read_target,
    request_options,
    same_options,
    type_request,
    why_option,
)
from memfit.cli.searching import OBJECTIVES, check_together, compare_offers, explain_why_not
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.files.flags import gather
from memfit.records.other_words import TASKS

if TYPE_CHECKING:
    from memfit.plan.request.as_stated import Stated
    from memfit.records.recipe import Recipe
    from memfit.records.request import Request
    from memfit.records.results import Certificate, Lever, Nearest, Plan

YOURS = "YOUR_DATA.jsonl"  # of a command that needs data, where none was named


@click.command("plan", short_help="Decide every knob left on `auto` under the limits.")
@click.argument("target", metavar="[MODEL|REQUEST.YAML]", required=False)
@request_options
@click.option("--devices", metavar="A:8,B:64", help="Compare offers: names, and how many of each.")
@click.option(
    "--objective",
    metavar="NAME",
    help=f"task.objective: {', '.join(TASKS)}. Of --devices: which offer is the best; fastest.",
)
@click.option(
    "--why-not",
    multiple=True,
    metavar="KEY=VALUE",
    callback=read_changes,
    help="Explain why this was not chosen, such as parallel.tp=8; repeatable.",
)
@folder_option
@why_option
@output_options
def plan_command(
    target: str | None,
    device: str | None,
    memory: str | None,
    changes: Changes,
    devices: str | None,
    objective: str | None,
    why_not: Changes,
    folder: Path | None,
    why: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Decide every knob left on `auto` under the limits; exit 3 when nothing fits.

    MODEL is a catalogue name, a hub id, or a folder with config.json; without it request.yaml of
    this folder is read, or a terminal prompts for three answers. On many devices it chooses the
    mesh, too: of memfit's own step FSDP, HSDP or DDP, or tensor parallelism, context parallelism or
    stages where these are a tenth faster or nothing else fits; with `framework: megatron` or
    `torchtitan` among every mesh of all devices.
    """  # fmt: skip
    from memfit import api

    if objective and (named := objective.lower().replace("_", "-")) in OBJECTIVES:
        objective = named
    elif objective is not None:
        name = objective.replace("-", "_")
        changes, objective = gather({"objective": name}, changes), None
    if not target and not Path("request.yaml").exists() and not devices and can_ask():
        target, device, changes = ask_three(device, changes)
    target = target or _request_here()
    check_together(devices=devices, device=device, why_not=why_not, changes=changes)
    if objective and not devices:
        raise InvalidRequest(
            f"`--objective {objective}` says which of several offers is the best, and `--devices`"
            " names none",
            hint=f"`--devices h100-sxm:8,a100-sxm-80:8 --objective {objective}`",
        )
    request = read_target(target, device, memory, changes)
    if devices:
        return compare_offers(request, devices, objective or OBJECTIVES[0], as_json)
    if why_not:
        return explain_why_not(request, why_not, as_json)
    plan = api.plan(request) if why or as_json or folder else api.plan_briefly(request)
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
        from memfit.screens.widgets.layout import make_console

        console = make_console()
        if why:
            from memfit.screens.plan import show_plan

            show_plan(console, plan, commands=commands)
        else:
            from memfit.screens.short import show_short

            show_short(console, plan, commands=commands)
    return _exit_code(plan.memory.verdict)


def _exit_code(verdict: str) -> int:
    return DoesNotFit.exit_code if verdict == "does_not_fit" else 0


def _after_plan(
    plan: Plan, target: str, device: str | None, memory: str | None, changes: Changes,
    folder: Path | None,
) -> list[str]:  # fmt: skip
    """What one would type next: make it fit, prove it, or train."""
    words = f"{shlex.quote(target)}{same_options(device, memory, changes)}"
    if plan.memory.verdict == "does_not_fit" and plan.ways_out:
        name = shlex.quote(target)
        return [
            f"memfit plan {name}{changed_options(device, memory, changes, way.changes)}"
            for way in plan.ways_out[:2]
        ]
    if not plan.recipe.is_own:
        chosen = plan.chosen.changes if plan.chosen else {}
        stated = changed_options(device, memory, changes, chosen)
        return [
            f"memfit predict {shlex.quote(target)}{stated} --why",
            "memfit accuracy --what time --by framework",
        ]
    if plan.memory.verdict == "does_not_fit":
        return [f"memfit plan {words} --why"]
    if folder:
        return [f"memfit certify {shlex.quote(str(folder / 'plan.json'))}"]
    commands = [f"memfit certify {words}"]
    if plan.request.task.data:
        commands.append(f"memfit train {words}")
    return commands


@click.command("predict", short_help="Memory and time of one stated configuration.")
@click.argument("target", metavar="RECIPE.YAML")
@request_options
@folder_option
@click.option("--timeline", is_flag=True, help="Draw a step's seconds: a Chrome trace.")
@why_option
@output_options
def predict_command(
    target: str,
    device: str | None,
    memory: str | None,
    changes: Changes,
    folder: Path | None,
    timeline: bool,
    why: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Memory and time of one fully stated configuration, without a search."""
    from memfit import api

    _check_home(folder, timeline)
    plan = api.predict_with_levers(read_target(target, device, memory, changes))
    if folder:
        api.write_plan(plan, folder)
        note(quiet)(f"wrote {folder / 'plan.json'}")
        if timeline:
            note(quiet)(f"wrote {api.write_step_trace(plan, folder)}")
    return _finish(plan, as_json, why, _after_plan(plan, target, device, memory, changes, None))


@click.command("certify", short_help="Prove a plan with the trainer's own step on fake tensors.")
@click.argument("target", metavar="PLAN.JSON|REQUEST.YAML|MODEL")
@request_options
@folder_option
@anyway_option
@click.option(
    "--timeline",
    is_flag=True,
    help="Draw memory event by event: a page, a Chrome trace, an allocator snapshot.",
)
@click.option("--why", is_flag=True, help="Every phase, and every tensor alive at the peak.")
@click.option("--levers", is_flag=True, help="Certify each knob turned by itself; takes minutes.")
@no_cache_option
@full_trace_option
@output_options
def certify_command(
    target: str,
    device: str | None,
    memory: str | None,
    changes: Changes,
    folder: Path | None,
    anyway: bool,
    timeline: bool,
    why: bool,
    levers: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prove a plan: run the trainer's own step on fake tensors of the target device.

    Needs no accelerator. Writes certificate.json beside plan.json, or into --folder. Exit 3 when
    it does not fit, with the nearest recipe that does, certified too.

    Of several devices the rank that needs the most memory is certified. What they can run and no
    plan describes is certified as it is stated, with plain defaults, which are named.
    """
    from memfit import api

    say = note(quiet)
    request = read_target(target, device, memory, changes)
    if not api.find_plan(Path(target)) and (stated := api.read_unplanned(request)):
        return _certify_unplanned(request, stated, folder, timeline, as_json, why, levers, say)
    plan, home = _plan_of(target, request, folder)
    _check_home(home, timeline)
    typed = Typed(target=target, device=device, memory=memory, changes=changes)
    if plan.memory.verdict == "does_not_fit" and not anyway:
        say("the plan does not fit, so it is not certified itself; --anyway does that too")
        return _show_miss(plan, typed, as_json, why, say)
    say(f"certifying recipe {plan.recipe_digest} for {plan.recipe.placed_on}")
    certificate = _certify(plan.recipe, plan.memory.usable, home, timeline, say)
    if home:
        api.write_plan(plan, home)
    turned = _find_levers(plan.request, certificate, say) if levers else None
    nearest = None
    if certificate.memory.verdict == "does_not_fit":
        say("searching the nearest recipe that fits")
        nearest = api.find_nearest(plan, certificate)
    if as_json:
        print_json(_with_time(certificate, plan, turned or (), nearest))
    else:
        commands = _after_certificate(certificate, plan, home, typed, nearest)
        _show(certificate, plan, commands, why, turned, nearest)
    return _exit_code(certificate.memory.verdict)


def _certify_unplanned(
    request: Request,
    stated: Stated,
    home: Path | None,
    timeline: bool,
    as_json: bool,
    why: bool,
    levers: bool,
    say: Callable[[str], None],
) -> int:
    """Certify what a request states, without a plan."""
    _check_home(home, timeline)
    recipe = stated.recipe
    for line in (stated.because, *(f"assumed: {assumed}" for assumed in stated.assumptions)):
        say(line)
    say(f"certifying recipe {recipe.digest} for {recipe.placed_on}")
    certificate = _certify(recipe, stated.usable, home, timeline, say)
    turned = _find_levers(request, certificate, say) if levers else None
    if as_json:
        from memfit.records import to_data

        more = {"because": stated.because, "levers": to_data(turned or ()), "nearest": None}
        print_json({**to_data(certificate), **more})
    else:
        _show(certificate, None, [], why, turned, None)
    return _exit_code(certificate.memory.verdict)


def _find_levers(
    request: Request, certificate: Certificate, say: Callable[[str], None]
) -> Sequence[Lever]:
    """Each knob turned by itself, certified."""
    from memfit import api

    say("certifying every lever")
    return api.find_levers(request, certificate)


def _show(
    certificate: Certificate,
    plan: Plan | None,
    commands: list[str],
    why: bool,
    levers: Sequence[Lever] | None,
    nearest: Nearest | None,
) -> None:
    """Print the short screen, or the whole one."""
    from memfit.screens.certificate import show_certificate
    from memfit.screens.short_certificate import show_short_certificate
    from memfit.screens.widgets.layout import make_console

    show = show_certificate if why else show_short_certificate
    show(make_console(), certificate, plan, commands=commands, levers=levers, nearest=nearest)


def _check_home(home: Path | None, timeline: bool) -> None:
    from memfit import api

    if home:
        api.check_writable(home)
    elif timeline:
        raise InvalidRequest(
            "`--timeline` writes files, and no folder is named",
            hint="add `--folder runs/first`",
        )


def _certify(
    recipe: Recipe,
    usable: int | None,
    home: Path | None,
    timeline: bool,
    say: Callable[[str], None],
) -> Certificate:
    """Certify, and write what there is to write."""
    import tempfile

    from memfit import api

    if home is None:
        return api.certify(recipe, usable=usable)
    with tempfile.TemporaryDirectory(prefix="memfit-") as place:
        recording = Path(place) / "recording" if timeline else None
        certificate = api.certify(recipe, usable=usable, tape=recording)
        drawn = api.write_timeline(recording, certificate, home) if recording else []
    api.write_certificate(certificate, home)
    for path in (home / "certificate.json", *drawn):
        say(f"wrote {path}")
    if timeline and certificate.memory.peak_reserved is None:
        say("no snapshot for PyTorch's memory viewer: a CPU has no caching allocator")
    return certificate


class Typed(NamedTuple):
    """The target and options of a command line, to be repeated with a change."""

    target: str
    device: str | None
    memory: str | None
    changes: Changes

    def retype(self, more: Changes) -> str:
        """The target and its options with more keys set."""
        options = changed_options(self.device, self.memory, self.changes, more)
        return f"{shlex.quote(self.target)}{options}"


def _show_miss(
    plan: Plan, typed: Typed, as_json: bool, why: bool, say: Callable[[str], None]
) -> int:
    """A plan that cannot fit needs no certificate, but what comes nearest to it does."""
    from memfit import api

    say("searching the nearest recipe that fits")
    nearest = api.find_nearest(plan, None)
    if as_json:
        from memfit.records import to_data

        print_json({**to_data(plan), "nearest": to_data(nearest)})
        return _exit_code(plan.memory.verdict)
    from memfit.screens.certificate import show_nearest
    from memfit.screens.plan import show_plan
    from memfit.screens.short import show_short
    from memfit.screens.widgets.layout import make_console, next_commands

    console = make_console()
    show = show_plan if why else show_short
    show(console, plan, commands=[])
    show_nearest(console, nearest, plan.recipe.device)
    next_commands(console, _after_miss(plan, typed, nearest))
    return _exit_code(plan.memory.verdict)


def _after_miss(plan: Plan, typed: Typed, nearest: Nearest | None) -> list[str]:
    """Return the nearest recipe's command; a fixed plan needs `memfit plan` first."""
    from memfit import api

    if nearest is None or nearest.memory.verdict == "does_not_fit":
        return []
    if api.find_plan(Path(typed.target)):
        anew = type_request(plan.request, nearest.changes)
        return [f"memfit plan {anew}"] if anew else []
    return [f"memfit certify {typed.retype(nearest.changes)}"]


def _plan_of(target: str, request: Request, folder: Path | None) -> tuple[Plan, Path | None]:
    """The plan of a plan.json as it stands, or of a request; and the folder that it belongs to."""
    from memfit import api

    if path := api.find_plan(Path(target)):
        return api.read_plan(path), folder or path.parent
    # what else was considered and levers take most of a plan's time, and this screen has its own
    plan = api.plan_fitting(request) or api.plan_alone(request)
    if folder or plan.memory.verdict == "does_not_fit":  # written, or shown, whole
        plan = api.plan(request)
    return plan, folder


def _with_time(
    certificate: Certificate, plan: Plan, levers: Sequence[Lever], nearest: Nearest | None
) -> dict[str, Any]:
    """A certificate proves memory; its time and cost are the plan's predictions."""
    from memfit.records import to_data

    return {
        **to_data(certificate),
        "time": to_data(plan.time),
        "cost": to_data(plan.cost),
        "levers": to_data(levers),
        "nearest": to_data(nearest),
    }


def _after_certificate(
    certificate: Certificate, plan: Plan, home: Path | None, typed: Typed, nearest: Nearest | None
) -> list[str]:
    if certificate.memory.verdict == "does_not_fit":
        return _after_miss(plan, typed, nearest)
    if not home:
        return []
    if not plan.request.task.data:
        anew = type_request(plan.request, {"task.data": YOURS})
        return [f"memfit train {anew}"] if anew else []
    return [f"memfit train {shlex.quote(str(home / 'plan.json'))}"]


@click.command("diff", short_help="Compare two certificates by component, module and tensor.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@output_options
def diff_command(first: str, second: str, as_json: bool, quiet: bool) -> int:
    """Compare two certificates: of two recipes, or of two library versions.

    A and B are each a certificate.json, the folder of a run, a plan.json, or a request or model,
    which is planned and certified now.
    """
    from memfit import api

    found = api.diff(first, second, say=note(quiet))
    if as_json:
        print_json(found)
    else:
        from memfit.screens.diff import show_diff
        from memfit.screens.widgets.layout import make_console

        show_diff(make_console(), found)
    return 0
