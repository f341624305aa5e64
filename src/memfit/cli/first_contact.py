"""help, completion, what `memfit` alone prints, and what a word that is no verb may mean."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from memfit.cli.options import output_options, print_json, same_options
from memfit.core.errors import InvalidRequest, UnknownName, shorten_name
from memfit.files.flags import BY_WORD, DEVICE, QLORA, find_flag, gather

WELCOME = """\
memfit {version}: know the memory of an LLM training step before you pay for it

  memfit plan qwen3-8b --device 4090 --qlora --seq-len 8k   does it fit?
  memfit plan llama-3.1-8b --device 8xH100 --method full    the fastest layout
  memfit certify qwen3-8b --device 4090 --qlora             proved, with no GPU
  memfit check train.py --device A100                       your own script
  memfit solve sequence_length qwen3-8b --device 4090       the longest rows

  memfit models qwen       what it knows        memfit devices 80GB
  memfit init              a request to edit    memfit ui   the same on a page
  memfit help              every verb           memfit help plan   its flags"""
SHELLS = ("bash", "zsh", "fish")
STARTUP_LINES = {  # the file that each shell reads at its start, and the line for it
    "bash": 'eval "$(memfit completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(memfit completion zsh)"  # in ~/.zshrc',
    "fish": "memfit completion fish | source  # in ~/.config/fish/config.fish",
}

GUESSED = {  # words that people type first -> the verb
    "estimate": "plan", "calculate": "plan", "calc": "plan", "fit": "plan", "fits": "plan",
    "vram": "plan", "memory": "plan", "verify": "certify", "prove": "certify",
    "simulate": "certify",
    "finetune": "train", "fine-tune": "train", "tune": "train", "run": "train", "resume": "train",
    "profile": "measure", "benchmark": "measure", "bench": "measure", "compare": "diff",
    "chat": "generate", "sample": "generate", "convert": "export", "optimize": "solve",
    "gpus": "devices", "gpu": "devices", "list": "models", "version": "--version",
    "status": "report", "show": "report", "cluster": "launch", "new": "init",
}  # fmt: skip


def show_welcome(version: str) -> None:
    """What to type first, in fewer lines than a screen."""
    click.echo(WELCOME.format(version=version))


METHODS = ("auto", "full", "lora", "qlora")
FILLERS = (  # between a model and what else one says of it
    "on", "with", "for", "in", "using", "@", "a", "an", "one", "my", "training", "finetune",
    "finetuning", "fine-tune", "fine-tuning",
)  # fmt: skip
FOUR_BITS, EIGHT_BITS = ("4bit", "4-bit", "nf4"), ("8bit", "8-bit", "int8")
LENGTH = re.compile(r"\d+k", re.IGNORECASE)  # tokens of a row; no device is called so


def can_ask() -> bool:
    """Whether somebody sits at a terminal who can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_three(device: str | None, changes: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Prompt on stderr for the model, and for the device and the method where no flag states them.

    Returns them, the method among the changes, and says how to type the same at once.
    """
    target = click.prompt("Which model? A name, a hub id or a folder", "qwen3-8b", err=True)
    if device is None:
        device = click.prompt("Which device, such as 4090, A100 or 8xH100?", "4090", err=True)
    if "method" not in changes:
        choice = click.Choice(METHODS)
        method = click.prompt("How is it trained?", "auto", type=choice, err=True)
        changes = changes if method == "auto" else gather({"method": method}, changes)
    typed = f"memfit plan {shlex.quote(target)}{same_options(device, None, changes)}"
    click.echo(f"the same, typed: {typed}\n", err=True)
    return target, device, changes


def refuse_verb(args: list[str], verbs: Iterable[str]) -> InvalidRequest:
    """The error for a line whose first word is no verb, with what the line may have meant."""
    word, see = args[0], "`memfit --help` lists them"
    if meant := GUESSED.get(word.lower()):
        hint = f"that is `memfit {meant}` here ({see})"
    elif is_planned(word):
        hint = f"`{shlex.join(['memfit', 'plan', *args])}` plans it"
    else:
        return UnknownName("verb", word, verbs, see=see)
    return InvalidRequest(f"unknown verb: `{shorten_name(word)}`", hint=hint)


def part_words(words: list[str], stated: Iterable[str]) -> list[str]:
    """`qwen3-8b qlora on 4090`, as one says it, as a model and the options that its words are.

    stated: what else was typed.
    Raises InvalidRequest where words after a model's name mean nothing, or what a flag sets.
    """
    taken = {_find_key(word.partition("=")[0]) for word in stated}
    end = next(_find_ends(words), 0)
    if not end:
        return [" ".join(words)]
    name = " ".join(words[:end])
    rest = [word for word in words[end:] if word.lower() not in FILLERS]
    keys = _read_words(rest)
    if keys is None:
        return _refuse_words(name, words, rest)
    if twice := sorted(taken & set(keys)):
        raise InvalidRequest(
            f"`{' '.join(rest)}` after `{name}` and a flag both set `{twice[0]}`",
            hint="keep one of the two"
            + ("; a device of several words stands in quotes" if twice == [DEVICE] else ""),
        )
    return [name, *(word for key, value in keys.items() for word in _type(key, value))]


def _find_ends(words: list[str]) -> Iterator[int]:
    """How many words are a model's name: the most; then those before one that says more of it."""
    for end in range(len(words), 0, -1):
        if is_planned(" ".join(words[:end])):
            yield end
    for end in range(1, len(words)):
        if words[end].lower() in FILLERS or _read_word(words[end].lower()):
            yield end


def _type(key: str, value: str) -> tuple[str, str]:
    flag = find_flag(key)
    return (f"--{flag.names[0]}", value) if flag else ("--set", f"{key}={value}")


def _find_key(word: str) -> str:
    """The request's key that a flag sets; a word that is none, such as a key of `--set`, itself."""
    flag = BY_WORD.get(word.lstrip("-").replace("-", "_")) if word.startswith("--") else None
    return flag.key if flag else word


def _read_words(words: Sequence[str]) -> dict[str, str] | None:
    """The request's keys that words beside a model's name set; None where they are not clear."""
    keys: dict[str, str] = {}
    device: list[str] = []
    for word in words:
        changes = _read_word(word.lower())
        if not changes:
            device.append(word)
        for key, value in changes.items():
            pair = {value, keys.get(key, value)}
            if len(pair) > 1 and pair != {"lora", QLORA}:  # `lora 4bit` is qlora
                return None
            keys[key] = QLORA if QLORA in pair else value
    if not device:
        return keys
    return {**keys, DEVICE: " ".join(device)} if _names_device(" ".join(device)) else None


def _read_word(word: str) -> dict[str, str]:
    """What one word sets; nothing where it is none of these."""
    from memfit.records.other_words import TASKS  # which no welcome waits for

    if word in (*METHODS, "dora", "freeze"):
        return {"method": word}
    if (task := word.replace("-", "_")) in TASKS:
        return {"task.objective": task}
    if word in FOUR_BITS:
        return {"method": QLORA}
    if word in EIGHT_BITS:
        return {"method": "lora", "base_format": "int8"}
    if word in ("bf16", "fp32"):
        return {"precision": word}
    return {"task.sequence_length": word} if LENGTH.fullmatch(word) else {}


def _refuse_words(name: str, words: list[str], rest: list[str]) -> list[str]:
    """All words as one name, of which the catalogue may know more; raises InvalidRequest else."""
    from memfit import catalog
    from memfit.catalog.device_names import say_instead

    whole, left = " ".join(words), [word for word in rest if not _read_word(word.lower())]
    try:
        catalog.find_model(whole)
    except UnknownName as error:
        raise InvalidRequest(
            f"`{shorten_name(' '.join(rest))}` after `{name}` is not one method, objective, length"
            " and device",
            hint=say_instead(" ".join(left))
            or f"such as `memfit plan {shlex.quote(name)} qlora 8k on 4090`; `memfit devices` lists"
            " devices",
        ) from error
    except InvalidRequest:
        pass  # it says more of the name, where it is read
    return [whole]


def _names_device(text: str) -> bool:
    from memfit.catalog.machines import find_machine
    from memfit.core.devices_as_written import read_devices
    from memfit.plan.request.problem import find_device

    try:
        name = read_devices(text).name
        return bool(find_machine(name) or find_device(name))
    except InvalidRequest:
        return False


def is_planned(word: str) -> bool:
    """Whether a word is a model's name, a hub id, a folder, or a file that a request may be."""
    if Path(word).suffix in {".yaml", ".yml"} or Path(word).is_dir():
        return True
    if "/" in word and " " not in word:
        return True
    from memfit import catalog

    try:
        catalog.find_model(word)
    except InvalidRequest:
        return False
    return True


@click.command("help", short_help="Show the help of memfit, or of one verb.")
@click.argument("verb", required=False)
@output_options
@click.pass_context
def help_command(ctx: click.Context, verb: str | None, as_json: bool, quiet: bool) -> None:
    """Show the help of memfit, or of VERB."""
    del quiet
    above = ctx.parent or ctx
    group = above.command
    text = group.get_help(above)
    if verb:
        assert isinstance(group, click.Group)
        command = group.get_command(above, verb)
        if command is None:
            verbs = group.list_commands(above)
            raise UnknownName("verb", verb, verbs, see="`memfit --help` lists them")
        own = click.Context(command, info_name=verb, parent=above, **command.context_settings)
        text = command.get_help(own)
    if as_json:
        print_json({"help": text})
    else:
        click.echo(text)


@click.command("completion", short_help="Print what makes a shell complete verbs and flags.")
@click.argument("shell", type=click.Choice(SHELLS))
@output_options
@click.pass_context
def completion_command(ctx: click.Context, shell: str, as_json: bool, quiet: bool) -> None:
    """Print the script with which a shell completes memfit's verbs and flags.

    In ~/.bashrc: eval "$(memfit completion bash)"; zsh likewise; in fish's configuration: memfit
    completion fish | source.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    made = found((ctx.parent or ctx).command, {}, "memfit", "_MEMFIT_COMPLETE")
    script = made.source_template % made.source_vars()
    if as_json:
        print_json({"shell": shell, "script": script})
        return
    click.echo(script)
    if not quiet:
        click.echo(f"to switch it on: {STARTUP_LINES[shell]}", err=True)
