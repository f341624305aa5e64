"""init, schema, doctor."""

from __future__ import annotations

from pathlib import Path

import click

from memfit.cli.options import note, output_options, print_json


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
    from memfit.screens.layout import make_console

    show_doctor(make_console(), found)
