"""The group of verbs, and what every verb shares: errors, exit codes, interruption.

Exit codes: 0 ok or fits, 2 user error, 3 does not fit, 4 not certified, 5 the run failed,
1 a bug of memfit's, 130 interrupted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import click

from memfit import __version__
from memfit.core.errors import Error, InvalidRequest
from memfit.core.system.refused import explain_refusal
from memfit.core.system.streams import guarded_output, in_lines, open_closed_streams

INTERRUPTED = 130
SEVERAL = re.compile(r"[,\s]+")  # between words of one argument
EXTRAS = {
    "train": ("torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "numpy"),
    "ui": ("starlette", "uvicorn"),
}
REPORT_TO = "please report it with the output of `memfit doctor` and MEMFIT_DEBUG=1"
# verb -> module of `memfit.cli` that holds it; the order is that of --help
VERBS = {
    "plan": "planning",
    "solve": "searching",
    "predict": "planning",
    "certify": "planning",
    "diff": "planning",
    "train": "running",
    "measure": "running",
    "report": "running",
    "ui": "window",
    "generate": "running",
    "merge": "running",
    "launch": "neighbours",
    "export": "neighbours",
    "check": "neighbours",
    "models": "looking",
    "devices": "looking",
    "networks": "looking",
    "budget": "looking",
    "formats": "looking",
    "rules": "looking",
    "accuracy": "looking",
    "calibrate": "setting_up",
    "init": "setting_up",
    "schema": "setting_up",
    "doctor": "setting_up",
    "completion": "first_contact",
    "help": "first_contact",
}


REQUEST_VERBS = ("plan", "predict", "certify", "solve", "export", "train", "measure")
MODEL_WORDS = ("--model", "--model-name-or-path", "--base-model", "--model-name")


class Verbs(click.Group):
    """The verbs, each imported at its first use, with a did-you-mean for unknown ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which one meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"memfit.cli.{VERBS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but a verb that does not exist offers the nearest ones."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from memfit.cli.first_contact import refuse_verb

            raise refuse_verb(args, VERBS)
        command = self.get_command(ctx, args[0]) if args else None
        return super().resolve_command(ctx, join_name(put_model_in_place(args), command))


def join_name(args: list[str], command: click.Command | None = None) -> list[str]:
    """`qwen3 14b on 4090`, as one says it: one name of the verbs that take one, and options.

    command: the verb's, whose options say which words are their values; words that say something
    of a model stand on either side of options then.
    """
    if not args or args[0] not in REQUEST_VERBS:
        return args
    words, others = _part_options(args[1:], command)
    words = [args[0], *words]
    first = _place_of_model(args[0])
    if len(words) <= first + 1 and not SEVERAL.search(words[-1]):
        return args
    from memfit.cli.first_contact import is_planned, part_words

    if len(words) <= first + 1:  # one sentence in quotes, unless it is a name
        parts = [word for word in SEVERAL.split(words[-1]) if word]
        if len(words) <= first or len(parts) < 2 or is_planned(words[first]):
            return args
        words = [*words[:first], *parts]
    return [*words[:first], *part_words(words[first:], args), *others]


def _place_of_model(verb: str) -> int:
    """How many words stand before the model's name: the verb, and the field of `solve`."""
    return 2 if verb == "solve" else 1


def _part_options(
    typed: Sequence[str], command: click.Command | None
) -> tuple[list[str], list[str]]:
    """The words that are no option's, up to one that no option is known to be, and all others."""
    valued = {
        name: not (param.is_flag or param.count)
        for param in (command.params if command else ())
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }
    words: list[str] = []
    others: list[str] = []
    left = list(typed)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        others.append(word)
        name, equals, _ = word.replace("_", "-").partition("=")
        if name not in valued:  # what follows it may be its value
            return words, others + left
        if valued[name] and not equals and left:
            others.append(left.pop(0))
    return words, others


def put_model_in_place(args: list[str]) -> list[str]:
    """`--model NAME`, as trainers write it, as the positional NAME of verbs that take a request."""
    if not args or args[0] not in REQUEST_VERBS:
        return args
    first = _place_of_model(args[0])
    found: list[str] = []
    named: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in MODEL_WORDS:
            named.append(value if equals else next(words, word))
        else:
            found.append(word)
    return [*found[:first], *named, *found[first:]]


@click.command(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },  # other trainers write `--max_seq_length`
    epilog="Start with: memfit plan llama-3.1-8b --device h100-sxm",
)
@click.version_option(__version__, prog_name="memfit")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Know the memory of an LLM training step before you pay for it: plan, certify, train, report.

    Data goes to stdout, everything else to stderr; --json prints the whole result of any verb.
    Exit codes: 0 ok or fits, 2 user error, 3 does not fit, 4 not certified, 5 the run failed.
    """
    if ctx.invoked_subcommand is None:
        from memfit.cli.first_contact import show_welcome

        show_welcome(__version__)


def run_words(words: list[str]) -> int:
    """Run one command line; returns its exit code."""
    open_closed_streams()
    return run(lambda: app.main(words, prog_name="memfit", standalone_mode=False), words)


def run(work: Callable[[], object], words: Sequence[str] = ()) -> int:
    """Run a verb and turn whatever leaves it into one clear message and an exit code.

    words: what was typed, of which hints speak.
    A reader that has seen enough changes nothing: the work goes on to its end and its code is true.
    """
    with guarded_output() as (out, err):
        code = _run(work, words)
        out.flush()
        if out.is_lost and not code:
            assert out.error is not None
            code = _say(f"the output could not be written: {out.error.strerror}", "", 2)
        err.flush()
        return code


def _run(work: Callable[[], object], words: Sequence[str]) -> int:
    try:
        done = work()
        return done if isinstance(done, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except SystemExit as leave:  # a library's
        return _read_code(leave.code)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", "", INTERRUPTED)
    except click.UsageError as error:
        return _say(*_describe_usage(error, words), error.exit_code)
    except click.ClickException as error:
        return _say(error.format_message(), "", error.exit_code)
    except Error as error:
        return _say(error.message, error.hint, error.exit_code)
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        extra = next((extra for extra, names in EXTRAS.items() if name in names), None)
        if extra is None:
            return _bug(error)
        from memfit.core.libraries import install_extra

        missing = InvalidRequest(
            f"this needs `{error.name}`, which is not installed",
            hint=install_extra(extra),
        )
        return _say(missing.message, missing.hint, missing.exit_code)
    except Exception as error:
        return _say_system(error)


def _say_system(error: Exception) -> int:
    """Memory, room on a disk or a right to a file that the system refused; all else is a bug."""
    refused = explain_refusal(error)
    return _say(refused.message, refused.hint, refused.exit_code) if refused else _bug(error)


def _read_code(code: object) -> int:
    """As Python reads what SystemExit carries."""
    if code is None or isinstance(code, int):
        return code or 0
    return _say(str(code), "", 1)


def _describe_usage(error: click.UsageError, words: Sequence[str]) -> tuple[str, str]:
    """The message and the hint of a command line that cannot be read."""
    message = " ".join(error.format_message().split())
    shown = f"`{error.ctx.command_path} --help`" if error.ctx else "`memfit --help`"
    if isinstance(error, click.NoSuchOption):
        typed = _typed_value(error.option_name, words)
        from memfit.cli.first_contact import describe_option

        if own := describe_option(error.option_name, typed, error.ctx):
            # click's own guesses are by letters, and the answer is known
            return f"No such option '{error.option_name}'.", f"{own}; {shown}"
    elif isinstance(error, click.MissingParameter) and error.ctx:
        return message, f"it is typed as `{_type_usage(error)}`; {shown}"
    elif "unexpected extra argument" in message and error.ctx:
        usage = _type_usage(error)
        if usage == error.ctx.command_path:
            usage += f" {error.ctx.command.params[0].opts[0]} …"
        return message, f"it is typed as `{usage}`; {shown}"
    return message, shown


def _typed_value(name: str, words: Sequence[str]) -> Any:
    """What was typed behind an option, as YAML reads it; True where nothing was."""
    from memfit.cli.options import read_value

    for word, following in zip(words, [*words[1:], "--"], strict=False):
        own, equals, _ = word.replace("_", "-").partition("=")
        if own == name.replace("_", "-"):
            if not equals and following.startswith("-"):
                return True
            text = word.partition("=")[2] if equals else following
            try:
                return read_value(own, text)
            except InvalidRequest:
                return text
    return True


def _type_usage(error: click.UsageError) -> str:
    """A command with all that it cannot do without, as it is typed."""
    assert error.ctx is not None
    words = [error.ctx.command_path]
    for needed in (each for each in error.ctx.command.params if each.required):
        words += [needed.opts[0]] if isinstance(needed, click.Option) else []
        words.append(needed.make_metavar(error.ctx))
    return " ".join(words)


def _say(message: str, hint: str, code: int) -> int:
    if os.environ.get("MEMFIT_DEBUG"):
        import traceback

        traceback.print_exc()
    click.echo(f"error: {in_lines(message)}", err=True)
    if hint:
        click.echo(f"hint: {in_lines(hint)}", err=True)
    return code


def _bug(error: Exception) -> int:
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return _say(f"this is a bug in memfit ({what})", REPORT_TO, 1)
