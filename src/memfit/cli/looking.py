"""models, devices, budget, formats, rules, accuracy: what one looks up before planning."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from memfit.cli.options import output_options, print_json
from memfit.core.errors import InvalidRequest

COUNT = re.compile(r"[\s\d.,_]+([eE][+-]?\d+)?\s*[kKMBT]?\s*")  # of devices; else offers
# what may be known of a budget, and how it is written
QUANTITIES = {
    "parameters": "Of the model, such as 7B.",
    "tokens": "To train on, such as 1.4T.",
    "compute": "Such as '1e21 FLOP' or '11.6 PFLOP-days'.",
    "device_hours": "Such as 20000.",
    "devices": "Number of them; or offers to compare: h100-sxm:8,a100-sxm-80:8.",
    "time": "Such as '30 d'.",
    "cost": "Such as '5000 USD'.",
    "device": "Accelerator: its peak and price; see `memfit devices`.",
    "peak": "Of one device, such as '989 TFLOP/s'.",
    "price": "Of a device-hour, such as '2.5 USD'; of offers also spot, reserved, …",
    "model": "Of offers: a catalogue model, how many tokens it can read.",
    "inference_tokens": "Tokens to be served over the model's life, such as 1T.",
    "inference_memory": "Where the model is to be served, such as '24 GiB'.",
    "serve_on": "Accelerator that serves it; without it --device.",
    "serve_price": "Of an hour of it, such as '1 USD' or spot.",
    "latency": "From one token of an answer to the next, at most: '30 ms'.",
}


class Tokens(click.IntRange):
    """A whole number, of which `8k` is 8,192, as of a row's tokens."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """As click's, of the number that a text stands for."""
        from memfit.records.looser import read_count

        read: Any = read_count("task.sequence_length", str(value))
        return super().convert(read, param, ctx)


class Share(click.types.FloatParamType):
    """A number, of which `40%` is 0.4."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """As click's, of a share or of one in a hundred."""
        text = str(value)
        bare: Any = text.removesuffix("%")
        found = super().convert(bare, param, ctx)
        return found / 100 if text.endswith("%") else found


@click.command("models", short_help="List and search the models of the catalogue.")
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
    from memfit.screens.widgets.layout import make_console

    show_models(make_console(), rows, api.supported_families())


@click.command("devices", short_help="List and search the accelerators of the catalogue.")
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
    from memfit.screens.widgets.layout import make_console

    show_devices(make_console(), rows)


@click.command("networks", short_help="List and search what joins machines.")
@click.argument("search", nargs=-1)
@output_options
def networks_command(search: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """List what joins machines; SEARCH words must all occur in a row."""
    from memfit import api

    del quiet
    rows = api.networks(" ".join(search))
    if as_json:
        print_json(rows)
        return
    from memfit.screens.catalogue import show_networks
    from memfit.screens.widgets.layout import make_console

    exchanges = api.time_exchanges(rows[0]) if len(rows) == 1 else ()
    show_networks(make_console(), rows, exchanges)


def _budget_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each quantity that may be known; the value carries its unit."""
    for name, example in reversed(QUANTITIES.items()):
        option = f"--{name.replace('_', '-')}"
        function = click.option(option, name, default="", metavar="X", help=example)(function)
    return function


@click.command("budget", short_help="Parameters, tokens, compute, time, money: each from others.")
@_budget_options
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp8", "tf32", "fp32"]),
    default="bf16",
    help="Whose dense peak counts.",
)
@click.option("--mfu", type=Share(), help="Share of the peak reached; 0.4 is assumed.")
@click.option("--context", type=Tokens(min=1), default=None, help="Tokens served at once.")
@click.option("--sequences", type=click.IntRange(min=1), default=1, help="Sequences served.")
@click.option("--weight-bytes", type=float, default=2.0, help="Bytes a served parameter.")
@click.option("--cache-bytes", type=float, default=2.0, help="Bytes an element of the cache.")
@output_options
def budget_command(as_json: bool, quiet: bool, context: int | None, **known: Any) -> None:
    """Parameters, tokens, compute, time, devices, money: give some, the others follow.

    compute = 6 x parameters x tokens = devices x time x peak x MFU; tokens = 20 x parameters where
    nothing else says them. With --inference-memory and --context the model is sized by what has to
    be served first. With --inference-tokens it is set beside the size that is cheapest to train and
    to serve, of the same quality, on --serve-on and within --latency.

    With offers in --devices, one line each: what --cost and --time buy there at the MFU of a
    predicted step (or --mfu), and which model that trains, compute-optimal and inference-first.
    """
    from memfit import api

    del quiet
    if known["devices"] and not COUNT.fullmatch(known["devices"]):
        offers = api.budget_offers(**known, context=context or 0)
        if as_json:
            print_json(offers)
            return
        from memfit.screens.offers import show_offers
        from memfit.screens.widgets.layout import make_console

        show_offers(make_console(), offers)
        return
    if known.pop("model"):
        raise InvalidRequest(
            "`--model` is of offers, and `--devices` names none",
            hint="`--devices h100-sxm:8`; one budget takes --parameters and --tokens",
        )
    budget = api.budget(**known, context=context or 0)
    if as_json:
        print_json(budget)
        return
    from memfit.screens.budget import show_budget
    from memfit.screens.widgets.layout import make_console

    show_budget(make_console(), budget)


@click.command(
    "formats",
    short_help="What a number becomes in each number format.",
    context_settings={"ignore_unknown_options": True},
)
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
    from memfit.screens.widgets.layout import make_console

    show_formats(make_console(), x, rows)


@click.command("rules", short_help="Rules of thumb about memory beside exact accounting.")
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
    from memfit.screens.rules import show_rules
    from memfit.screens.widgets.layout import make_console

    show_rules(make_console(), model, rows, api.RULES_PEAK)


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"`{text}` is not a number", hint=f"{what} is a number such as 3.14159265 or -2e-5"
        ) from None


@click.command("accuracy", short_help="How far predictions are off, over measured runs.")
@click.argument(
    "rows", nargs=-1, metavar="[ROWS.JSONL]...", type=click.Path(exists=True, path_type=Path)
)
@click.option(
    "--by",
    "ways",
    multiple=True,
    metavar="FIELD",
    default=("source", "kind", "device"),
    help="source, framework, device, kind, model, confidence or split; can be repeated.",
)
@click.option(
    "--what",
    type=click.Choice(("memory", "time")),
    default="memory",
    help="Bytes, or seconds of a step with one weight a source: memory.",
)
@click.option("--worst", metavar="N", type=click.IntRange(0), default=5, help="Rows shown: 5.")
@output_options
def accuracy_command(
    rows: tuple[Path, ...], ways: tuple[str, ...], what: str, worst: int, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Predict every measured run of the corpus today, and compare.

    ROWS are files or folders of rows; without any, the corpus that memfit comes with.
    """
    from memfit import api

    del quiet
    if what == "time":
        ways = tuple(way for way in ways if way != "kind")  # of bytes
        times = api.accuracy_of_times(rows, ways)
        if as_json:
            print_json(times)
            return
        from memfit.screens.accuracy_time import show_times
        from memfit.screens.widgets.layout import make_console

        show_times(make_console(), times, ways, worst)
        return
    found = api.accuracy(rows, ways)
    if as_json:
        print_json(found)
        return
    from memfit.screens.accuracy import show_accuracy
    from memfit.screens.widgets.layout import make_console

    show_accuracy(make_console(), found, ways, worst)
