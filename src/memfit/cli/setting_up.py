"""calibrate, init, schema, doctor."""

from __future__ import annotations

from pathlib import Path

import click

from memfit.cli.options import note, output_options, print_json


@click.command("calibrate", short_help="Measure this machine's device for better predictions.")
@click.option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:1.")
@click.option("--row", default="", metavar="ID", help="Id of the row; the device's own by default.")
@click.option("--quick", is_flag=True, help="Few sizes, in about five seconds: to try it out.")
@output_options
def calibrate_command(device: str, row: str, quick: bool, as_json: bool, quiet: bool) -> None:
    """Measure this machine's device, in about two minutes, and keep its figures as your own.

    Matrix products, attention, memory, copies to the host, launches, all_reduce. The row goes into
    devices.toml of ~/.config/memfit, and predictions for this device rest on it from then on;
    delete the row to go back to the catalogue's. The device should do nothing else meanwhile.
    """
    from memfit import api

    say = note(quiet)
    found = api.calibrate(device, row=row, quick=quick, say=say)
    say(f"wrote [{found.id}] of {found.own}")
    if as_json:
        print_json(found)
        return
    from memfit.screens.calibration import show_calibration
    from memfit.screens.widgets.layout import make_console

    show_calibration(make_console(), found)


@click.command("init", short_help="Write a commented request.yaml.")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="request.yaml")
@output_options
def init_command(path: Path, as_json: bool, quiet: bool) -> None:
    """Write a commented request.yaml, and beside it the schema that editors complete from."""
    from memfit import api

    written = api.init(path)
    if as_json:
        print_json({"request": str(written)})
    else:
        note(quiet)(f"wrote {written}; next: memfit plan {written}")


@click.command("schema", short_help="Print the JSON Schema of request.yaml.")
@click.argument("of", type=click.Choice(("request", "row")), default="request")
@output_options
def schema_command(of: str, as_json: bool, quiet: bool) -> None:
    """Print the JSON Schema of request.yaml, or of a row of the corpus of measured runs."""
    from memfit import api

    del as_json, quiet  # it is JSON either way
    print_json(api.schema(of))


@click.command("doctor", short_help="Versions, machine, accelerators, caches: for bug reports.")
@output_options
def doctor_command(as_json: bool, quiet: bool) -> None:
    """Versions, this machine, its accelerators and caches: paste it into bug reports."""
    from memfit import api

    del quiet
    found = api.doctor()
    if as_json:
        print_json(found)
        return
    from memfit.screens.doctor import show_doctor
    from memfit.screens.widgets.layout import make_console

    show_doctor(make_console(), found)
