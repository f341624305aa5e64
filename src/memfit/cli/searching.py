"""solve, and what `memfit plan` answers beside one plan: offers compared, why not."""

from __future__ import annotations

import shlex
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
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.files.flags import COUNT

if TYPE_CHECKING:
    from memfit.records.request import Request

OBJECTIVES = ("fastest", "cheapest", "fewest-devices")


def compare_offers(request: Request, devices: str, objective: str, as_json: bool) -> int:
    """`memfit plan --devices`: exit 3 when the request fits on none of them."""
    from memfit import api

    found = api.compare(request, devices, objective)
    if as_json:
        print_json(found)
    else:
        from memfit.screens.search import show_comparison
        from memfit.screens.widgets.layout import make_console

        show_comparison(make_console(), found)
    return 0 if found.plan else DoesNotFit.exit_code


def explain_why_not(request: Request, changes: Changes, as_json: bool) -> int:
    """`memfit plan --why-not KEY=VALUE`."""
    from memfit import api

    found = api.why_not(request, changes)
    if as_json:
        print_json(found)
    else:
        from memfit.screens.search import show_why_not
        from memfit.screens.widgets.layout import make_console

        show_why_not(make_console(), found)
    return 0


def check_together(
    *, devices: str | None, device: str | None, why_not: Changes, changes: Changes
) -> None:
    """Raise InvalidRequest for options that answer different questions."""
    if devices and (counted := changes.get(COUNT)):
        raise InvalidRequest(
            f"`--devices {devices}` and `--gpus {counted}` both say how many devices there are",
            hint=f"write it behind each name: `--devices h100-sxm:{counted},l40s:{counted}`",
        )
    if devices and device:
        raise InvalidRequest(
            f"`--devices {devices}` and `--device {device}` both say where to train",
            hint=f"one device among the offers: `--devices {device},{devices}`",
        )
    if devices and why_not:
        raise InvalidRequest("`--why-not` asks about one offer, and `--devices` names several")


@click.command("solve", short_help="The longest sequence, largest batch or model, fewest devices.")
@click.argument("field", metavar="FIELD")
@click.argument("target", metavar="[MODEL|REQUEST.YAML]", required=False)
@request_options
@output_options
def solve_command(
    field: str,
    target: str | None,
    device: str | None,
    memory: str | None,
    changes: Changes,
    as_json: bool,
    quiet: bool,
) -> int:
    """The most of one thing that fits; exit 3 when nothing does.

    FIELD is sequence_length, micro_batch, model (of the catalogue; needs no MODEL) or devices (the
    fewest). Every value tried is planned in full, with all knobs left on `auto` decided anew.
    """
    from memfit import api
    from memfit.cli.first_contact import is_planned
    from memfit.files.flags import find_field
    from memfit.plan.questions.solve import FIELDS, check_field

    if target and find_field(field) not in FIELDS and find_field(target) in FIELDS:
        field, target = target, field  # as many type them
    if target is None and field not in FIELDS and is_planned(field):
        others = [name for name in FIELDS if name != "sequence_length"]
        raise InvalidRequest(
            f"`memfit solve {field}` names no field to solve for",
            hint=f"`memfit solve sequence_length {shlex.quote(field)}`, or {', '.join(others)}",
        )
    field = find_field(field)
    if target is None and field in FIELDS:
        if field != "model":
            raise InvalidRequest(
                f"no model was named to solve for `{field}`",
                hint=f"`memfit solve {field} llama-3.1-8b --device h100-sxm`",
            )
        target = "llama-3.1-8b"  # replaced by each model of the catalogue
    check_field(field)
    note(quiet)(f"planning one value of {field} after the other")
    found = api.solve(field, read_target(target or "", device, memory, changes))
    if as_json:
        print_json(found)
    else:
        from memfit.screens.search import show_solved
        from memfit.screens.widgets.layout import make_console

        show_solved(make_console(), found)
    return DoesNotFit.exit_code if found.value is None else 0
