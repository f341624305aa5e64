"""models, devices, budget, formats, rules: what one looks up before planning."""

from __future__ import annotations

import click

from memfit.cli.options import output_options, print_json
from memfit.errors import InvalidRequest


@click.command("models")
@click.argument("search", nargs=-1)
@click.option("--family", metavar="NAME", default="", help="Only this family (HF's model_type).")
@click.option("--up-to", metavar="COUNT", default="", help="Only up to so many parameters: 8B.")
@output_options
def models_command(
    search: tuple[str, ...], family: str, up_to: str, as_json: bool, quiet: bool
) -> None:
    """List the models of the catalogue; SEARCH words must all occur in a row."""
    from memfit import api

    del quiet
    rows = api.models(" ".join(search), family=family, up_to=up_to)
    if as_json:
        print_json(rows)
        return
    from memfit.screens.catalogue import show_models
    from memfit.screens.layout import make_console

    show_models(make_console(), rows, api.supported_families())


@click.command("devices")
@click.argument("search", nargs=-1)
@click.option("--vendor", metavar="NAME", default="", help="Only this maker.")
@click.option("--at-least", metavar="SIZE", default="", help="Only with so much memory: '40 GiB'.")
@output_options
def devices_command(
    search: tuple[str, ...], vendor: str, at_least: str, as_json: bool, quiet: bool
) -> None:
    """List the accelerators of the catalogue; SEARCH words must all occur in a row."""
    from memfit import api

    del quiet
    rows = api.devices(" ".join(search), vendor=vendor, at_least=at_least)
    if as_json:
        print_json(rows)
        return
    from memfit.screens.catalogue import show_devices
    from memfit.screens.layout import make_console

    show_devices(make_console(), rows)


@click.command("formats", context_settings={"ignore_unknown_options": True})
@click.argument("number", metavar="X")
@click.option("--scale", metavar="MAX", help="Largest magnitude of the block that X is stored in.")
@output_options
def formats_command(number: str, scale: str | None, as_json: bool, quiet: bool) -> None:
    """What a number becomes in each format that training stores it in."""
    from memfit import api

    del quiet
    x = _number(number, "X")
    rows = api.formats(x, scale=None if scale is None else _number(scale, "--scale"))
    if as_json:
        print_json(rows)
        return
    from memfit.screens.formats import show_formats
    from memfit.screens.layout import make_console

    show_formats(make_console(), x, rows)


@click.command("rules")
@click.argument("model", metavar="MODEL")
@output_options
def rules_command(model: str, as_json: bool, quiet: bool) -> None:
    """Rules of thumb about memory beside what memfit counts for MODEL, and where each holds."""
    from memfit import api

    del quiet
    rows = api.rules(model)
    if as_json:
        print_json(rows)
        return
    from memfit.screens.layout import make_console
    from memfit.screens.rules import show_rules

    show_rules(make_console(), model, rows, api.RULES_PEAK)


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"`{text}` is not a number", hint=f"{what} is a number such as 3.14159265 or -2e-5"
        ) from None
