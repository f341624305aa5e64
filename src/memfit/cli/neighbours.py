"""launch, export, check: plans for other trainers, and their configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import (
    Changes,
    device_options,
    note,
    output_options,
    print_json,
    read_target,
    request_options,
    why_option,
)
from memfit.core.errors import DoesNotFit, InvalidRequest

if TYPE_CHECKING:
    from memfit.check.smaller_changes import Change
    from memfit.records.request import Request
    from memfit.records.results import Plan

LAUNCHERS = ("slurm", "skypilot", "k8s", "ray")


@click.command("launch", short_help="Write the job that trains a plan on a cluster.")
@click.argument("target", metavar="PLAN.JSON|RUN|REQUEST.YAML|MODEL")
@click.option(
    "--on", required=True, type=click.Choice(LAUNCHERS), help="Which launcher starts the job."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("job"),
    show_default=True,
    metavar="FOLDER",
    help="Where the job's files go.",
)
@request_options
@output_options
def launch_command(
    target: str,
    on: str,
    out: Path,
    device: str | None,
    memory: str | None,
    changes: Changes,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write the files of a job that trains a plan on a cluster, and how to submit it.

    Nothing is submitted. The job runs `memfit train` on every machine: by torchrun where there are
    several, which tells each rank its number. A plan of another framework's step starts that
    framework's own trainer.
    """
    from memfit import api

    made = api.export(_read_plan_or_request(target, device, memory, changes, note(quiet)), on)
    written = api.write_export(made, out)
    if as_json:
        print_json(made)
        return 0
    from memfit.screens.export import show_export
    from memfit.screens.widgets.layout import make_console

    show_export(make_console(), made, written)
    return 0


@click.command("export", short_help="Write a plan as another tool's configuration.")
@click.argument("target", metavar="PLAN.JSON|RUN|REQUEST.YAML|MODEL")
@click.option("--to", required=True, metavar="TARGET", help="For which tool; the list is above.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where the files go; without it, a target's only file is printed.",
)
@request_options
@output_options
def export_command(
    target: str,
    to: str,
    out: Path | None,
    device: str | None,
    memory: str | None,
    changes: Changes,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write a plan as the configuration of the tool that you train with.

    TARGET is one of accelerate, axolotl, deepspeed, dstack, k8s, llamafactory, megatron, ray,
    skypilot, slurm, torchtitan (0.3.0), torchtitan-main, trl. What is left open is decided for that
    tool's own step; what does not fit there ends with exit 3 and what would. Each file says at its
    head which plan and which version of the tool it is for, the peak that `memfit check` answers of
    it, the packages that it asks for, and what of the plan the tool has no key for.
    """
    from memfit import api

    made = api.export(_read_plan_or_request(target, device, memory, changes, note(quiet)), to)
    written = api.write_export(made, out) if out else []
    if as_json:
        print_json(made)
        return 0
    if not out:
        if len(made.files) > 1:
            raise InvalidRequest(
                f"`{to}` takes {len(made.files)} files: {', '.join(made.files)}",
                hint=f"name a folder for them: `memfit export {target} --to {to} --out FOLDER`",
            )
        click.echo(next(iter(made.files.values())), nl=False)
        for key, why in made.left_out.items():
            note(quiet)(f"not said: {key}: {why}")
        for needed in made.needs:
            note(quiet)(f"needs {needed.words}")
        return 0
    from memfit.screens.export import show_export
    from memfit.screens.widgets.layout import make_console

    show_export(make_console(), made, written)
    return 0


def _read_plan_or_request(
    target: str, device: str | None, memory: str | None, changes: Changes,
    say: Callable[[str], None],
) -> Plan | Request:  # fmt: skip
    """A plan.json, alone or of a run's folder; else a request, or a model."""
    from memfit import api

    path = Path(target)
    if (path / "plan.json").exists():
        path = path / "plan.json"
    if path.suffix == ".json" and path.name != "config.json" and api.is_plan(path):
        read_target(str(path), device, memory, changes)  # refuses options: a plan is fixed
        return api.read_plan(path)
    request = read_target(target, device, memory, changes)
    if request.hardware.device == "auto":
        say("planned for the device of this machine: `--device` names another")
    return request


@click.command("check", short_help="Say whether another tool's configuration fits a device.")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--count", "--gpus", "--num-gpus", "count", type=click.IntRange(1), metavar="N",
    help="Devices of each machine.",
)  # fmt: skip
@click.option(
    "--config",
    default="",
    metavar="NAME",
    help="Which configuration of a Python file that makes several, as torchtitan's `--config`.",
)
@click.option(
    "--oom",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="LOG",
    help="A log with torch's CUDA out-of-memory message, `-` is stdin: what did not fit.",
)
@click.option(
    "--patch", is_flag=True, help="Print nothing but the smallest change, for `patch -p0`."
)
@device_options
@why_option
@output_options
def check_command(
    files: tuple[Path, ...],
    count: int | None,
    config: str,
    oom: Path | None,
    patch: bool,
    device: str | None,
    memory: str | None,
    changes: Changes,
    why: bool,
    as_json: bool,
    quiet: bool,
) -> int:  # fmt: skip
    """Say whether another tool's configuration fits a device; exit 3 when it does not.

    FILE is a configuration of TRL or transformers' Trainer, accelerate, DeepSpeed, axolotl,
    LLaMA-Factory or torchtitan; a shell script that starts one of them with arguments; or a Python
    program or a notebook that makes a trainer of TRL's or transformers', which is read and never
    run. Name a launcher's and a trainer's together, and the device with --device. What the files
    leave open is assumed and listed. Where a key's memory is not described, the answer is what is
    needed at least, and the exit code 4. Where it does not fit, the smallest changes to the files
    that do are listed in their own keys.
    """
    from memfit import api

    data: dict[str, Any] = {}
    options = {"hardware.device": device, "hardware.count": count, "limits.memory": memory}
    for key, value in {**options, **changes}.items():
        if value is not None:
            api.put(data, key, value)
    message = api.read_out_of_memory(oom) if oom else None
    checked, plan = api.check(files, data, config)
    found = api.diagnose(message, plan) if message else None
    answer = api.judge(checked, plan, found)
    smallest: tuple[Change, ...] = ()
    if not plan.memory.is_within:
        smallest = api.find_changes(files, data, plan, config, checked.left_out)
    if patch:
        _print_patch(smallest, plan, note(quiet))
    elif as_json:
        from memfit.records import to_data

        print_json({
            **to_data(checked), "answer": to_data(answer), "plan": to_data(plan),
            "changes": to_data(smallest), "oom": to_data(found),
        })  # fmt: skip
    else:
        from memfit.screens.check import show_check
        from memfit.screens.widgets.layout import make_console

        show_check(make_console(), checked, answer, plan, smallest, found, why=why)
    return answer.exit_code


def _print_patch(smallest: Sequence[Change], plan: Plan, say: Callable[[str], None]) -> None:
    from memfit import api

    if smallest:
        click.echo(api.make_patch(smallest[0]), nl=False)
    elif plan.memory.verdict == "fits":
        say("it fits as it is: no patch")
    else:
        raise DoesNotFit("no change of the keys that memfit knows makes it fit")
