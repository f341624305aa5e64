"""ui: the page."""

from __future__ import annotations

from pathlib import Path

import click

from memfit.cli.options import note, output_options, print_json


@click.command("ui", short_help="Open a page that plans, explains and follows runs.")
@click.option("--port", type=click.IntRange(0, 65535), default=8391, show_default=True,
              help="Of this machine's loopback address; 0 takes a free one.")  # fmt: skip
@click.option("--runs", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"),
              metavar="FOLDER", show_default=True, help="Whose run folders are shown.")  # fmt: skip
@click.option("--browser/--no-browser", default=True, help="Open it in your browser.")
@output_options
def ui_command(port: int, runs: Path, browser: bool, as_json: bool, quiet: bool) -> None:
    """Open a local page: plan with sliders, compare, see a step's memory, follow runs, export.

    It is reachable from this machine alone, asks nothing of the network, and shows what the other
    verbs print with --json. Ctrl-C stops it. Needs the extra `ui`.
    """
    from memfit.ui import app

    def ready(address: str) -> None:
        if as_json:
            print_json({"address": address})
        else:
            click.echo(address)
        note(quiet)("Ctrl-C stops it")
        if browser:
            import webbrowser

            webbrowser.open(address)

    app.serve(runs, port=port, ready=ready)
