"""train, measure, report, generate, merge."""

from __future__ import annotations

import re
import shlex
import sys
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
)

if TYPE_CHECKING:
    from memfit.records.results import Report


@click.command("train", short_help="Train what was planned and certified; resumes by itself.")
@click.argument("target", metavar="REQUEST.YAML|PLAN.JSON|MODEL")
@request_options
@folder_option
@anyway_option
@click.option(
    "--continue", "continues", is_flag=True,
    help="Go on beyond the run's end, with more task.steps or another schedule.",
)  # fmt: skip
@click.option("--tensorboard", is_flag=True, help="run.trackers: add tensorboard.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=3, show_default=True,
    help="Lost ranks after which the run goes on by itself, on fewer.",
)  # fmt: skip
@click.option(
    "--regain",
    metavar="TIME",
    default="10 min",
    show_default=True,
    help="Time on fewer ranks until all are tried again.",
)
@output_options
def train_command(
    target: str,
    device: str | None,
    memory: str | None,
    changes: Changes,
    folder: Path | None,
    anyway: bool,
    continues: bool,
    tensorboard: bool,
    restarts: int,
    regain: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Plan and certify where that has not been done, then train; the same command resumes.

    Everything is written into the run folder, `runs/<name of the request>` unless --folder says
    another. Ctrl-C saves a checkpoint and stops.
    """
    from memfit import api

    elastic = api.read_elastic(restarts, regain)
    request = read_target(target, device, memory, changes)
    if tensorboard:
        request = api.add_tracker(request, "tensorboard")
    home = folder or _folder_of(target)
    say = note(quiet)
    progress = None if quiet else api.open_progress(sys.stderr)
    run = api.train(
        request, home, progress=progress, say=say, override=anyway, continues=continues,
        elastic=elastic, alone=True,
    )  # fmt: skip
    if not api.is_first_rank():
        return
    report = api.write_report(home)
    say(f"wrote {home / 'report.html'}")
    if as_json:
        print_json(run)
    else:
        _show(report, home)


def _folder_of(target: str) -> Path:
    """Where a run goes unless one says so: beside its plan, or runs/ with its request's name."""
    path = Path(target)
    if path.name == "plan.json":
        return path.parent
    name = path.stem if path.suffix in (".yaml", ".yml", ".json") else target
    return Path("runs") / (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run")


@click.command("measure", short_help="Run a few real steps here and compare.")
@click.argument("target", metavar="REQUEST.YAML|PLAN.JSON|MODEL")
@request_options
@click.option("--steps", type=click.IntRange(min=1), default=3, help="Timed steps.")
@click.option(
    "--append",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Add the run as one JSON line, as in measurements/.",
)
@click.option(
    "--submit", is_flag=True, help="Write the run as a file of its own, for a pull request."
)
@output_options
def measure_command(
    target: str,
    device: str | None,
    memory: str | None,
    changes: Changes,
    steps: int,
    append: Path | None,
    submit: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a few real steps on this machine, on random tokens and weights, and compare.

    Needs no data. It writes nothing but the row of --append or --submit.
    """
    from memfit import api

    request = read_target(target, device, memory, changes)
    api.refuse_ranks(request)
    plan = api.plan(request, device=api.find_machine(request))
    note(quiet)(f"measuring {steps} steps of recipe {plan.recipe_digest} on {plan.recipe.device}")
    run = api.measure(plan.recipe, steps=steps)
    report = api.join(plan, None, run)
    if append is not None:
        api.append_row(append, plan, run)
    if submit:
        path = api.submit_row(Path(), plan, run)
        note(quiet)(
            f"wrote {path}: look through it, then add it to measurements/ in a pull request;"
            f" `memfit accuracy {path}` judges it alone"
        )
    if as_json:
        print_json(_with_figures(report))
    else:
        _show(report, None)


def _with_figures(report: Report) -> dict[str, Any]:
    """A run with the keys that every verb's JSON has for memory and time, measured where known."""
    from memfit.records import to_data

    plan, data = report.plan, to_data(report.run)
    measured = {c.name: c.measured for c in report.comparisons}
    usable, peak = plan.memory.usable, measured["memory.peak_allocated"]
    total = measured.get("memory.device_total") or peak
    verdict = "unproven"
    if usable is not None and total is not None:
        verdict = "fits" if total <= usable else "does_not_fit"
    memory = {
        **{k: _whole(measured.get(f"memory.{k}"))
           for k in ("peak_allocated", "peak_reserved", "device_total")},
        "usable": usable,
        "verdict": verdict,
        "entries": data["ledger"]["entries"],
    }  # fmt: skip
    rate = measured.get("time.tokens_per_second")
    time = {
        "step_seconds": measured.get("time.step_seconds"),
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate,
        "mfu": measured.get("time.mfu"),
        "hfu": measured.get("time.hfu"),
        "model_flops_per_step": plan.time.model_flops_per_step,
    }
    return {**data, "memory": memory, "time": time}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


@click.command("report", short_help="Predicted, certified and measured, side by side.")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@output_options
def report_command(folder: Path, as_json: bool, quiet: bool) -> None:
    """Predicted, certified and measured of a run, side by side; writes report.json and .html."""
    from memfit import api

    report = api.write_report(folder)
    note(quiet)(f"wrote {folder / 'report.html'}")
    if as_json:
        print_json(report)
    else:
        _show(report, folder)


def _show(report: Report, folder: Path | None) -> None:
    from memfit.screens.report import show_report
    from memfit.screens.widgets.layout import make_console

    commands = []
    if folder and (folder / "model").exists():
        commands.append(_ask(folder, report))
    show_report(make_console(), report, commands=commands)


def _ask(folder: Path, report: Report) -> str:
    """The command that shows what a run's model says: of one that learned answers to messages, by
    its chat template."""
    command = f"memfit generate {shlex.quote(str(folder))}"
    talks = (folder / "model" / "chat_template.jinja").exists()
    if talks and report.run is not None and report.run.recipe.objective != "pretrain":
        return f'{command} --chat "Hello"'
    return f'{command} "Once upon a time"'


@click.command("generate", short_help="Continue a prompt with the model of a run.")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--tokens", type=click.IntRange(min=1), default=100, help="Most new tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, help="0: the likeliest.")
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Draw from so many of the likeliest tokens; 0: from all.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Draw from the likeliest tokens that have this share together.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Draw from tokens at least so likely as this share of the likeliest one.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="Above 1, tokens that are there already become less likely.",
)
@click.option(
    "--stop",
    "stop_words",
    multiple=True,
    metavar="TEXT",
    help="Stop behind this text; may be given many times.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Equal seeds, equal text.")
@click.option(
    "--chat", is_flag=True, help="PROMPT is a user's message, written by the chat template."
)
@output_options
def generate_command(
    folder: Path,
    prompt: str,
    *,
    chat: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Continue a prompt with the model that a run trained; the sample goes into its report."""
    from memfit import api

    del quiet
    sample = api.generate(folder, prompt, chat=chat, **settings)
    if as_json:
        print_json({"prompt": prompt, "text": sample})
    else:
        from memfit.screens.widgets.layout import printable

        text = sample if chat else prompt + sample
        click.echo(printable(text) if sys.stdout.isatty() else text)


@click.command("merge", short_help="Write an adapter into its base, as one model folder.")
@click.argument("folder", metavar="RUN|ADAPTER", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER", required=True,
    help="A folder that does not exist yet.",
)  # fmt: skip
@output_options
def merge_command(folder: Path, out: Path, as_json: bool, quiet: bool) -> None:
    """Write the adapter of a run, or of a folder in peft's format, into its base.

    The result is a folder that transformers loads. Weights keep the dtype of the base's files; what
    rounding to it loses of the adapter is measured and printed.
    """
    from memfit import api

    made = api.merge(folder, out)
    if as_json:
        print_json(made)
        return
    from memfit.screens.merged import describe

    for line in describe(made):
        click.echo(line)
    note(quiet)(f'memfit generate {shlex.quote(str(out))} "Once upon a time"')
