"""export: plans for other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memfit.cli.options import (
    Changes,
    note,
    output_options,
    print_json,
    read_target,
    request_options,
)
from memfit.errors import InvalidRequest

if TYPE_CHECKING:
    from memfit.results import Plan


@click.command("export", short_help="Write a plan as another tool's configuration.")
@click.argument("target", metavar="PLAN.JSON|RUN|REQUEST.YAML|MODEL")
@click.option("--to", required=True, metavar="TARGET", help="For which tool; the list is above.")
@click.option(
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
    skypilot, slurm, torchtitan (0.3.0), torchtitan-main, trl. Each file says at its head which plan
    and which version of the tool it is for, the predicted peak under that tool's own step where
    memfit describes one, and what of the plan the tool has no key for.
    """
    from memfit import api

    made = api.export(_plan_of(target, device, memory, changes), to)
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
        return 0
    from memfit.screens.export import show_export
    from memfit.screens.layout import make_console

    show_export(make_console(), made, written)
    return 0


def _plan_of(target: str, device: str | None, memory: str | None, changes: Changes) -> Plan:
    """A plan.json, alone or of a run's folder; a request or a model is planned now."""
    from memfit import api

    path = Path(target)
    if (path / "plan.json").exists():
        path = path / "plan.json"
    if path.suffix == ".json" and path.name != "config.json" and api.is_plan(path):
        read_target(str(path), device, memory, changes)  # refuses options: a plan is fixed
        return api.read_plan(path)
    return api.plan(read_target(target, device, memory, changes))
