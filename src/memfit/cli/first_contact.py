"""help, completion, what `memfit` alone prints, and what a word that is no verb may mean."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import output_options, print_json, same_options
from memfit.core.errors import InvalidRequest, UnknownName, shorten_name
from memfit.files.flags import BY_WORD, DEVICE, QLORA, find_flag, gather

if TYPE_CHECKING:
    from memfit.records.other_words import Answer

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
    "finetuning", "fine-tune", "fine-tuning", "train", "and", "at", "of", "the", "from", "under",
    "within", "context",
)  # fmt: skip
UNITS = {  # behind a number -> what the two words set
    **dict.fromkeys(("epoch", "epochs"), "task.epochs"),
    **dict.fromkeys(("step", "steps"), "task.steps"),
    **dict.fromkeys(("hour", "hours", "day", "days"), "limits.time"),
    **dict.fromkeys(("node", "nodes"), "hardware.nodes"), "tokens": "task.tokens",
}  # fmt: skip
COUNTED = re.compile(r"(\d[\d.,]*[kMBT]?) ([a-z]+)", re.IGNORECASE)
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
    words = _put_name_first([word.rstrip(",") for word in words if word.strip(", ")] or words)
    end = next(_find_ends(words), 0)
    if not end:
        return [" ".join(words)]
    name = " ".join(words[:end])
    rest = list(_join_counts([word for word in words[end:] if word.lower() not in FILLERS]))
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


def _put_name_first(words: list[str]) -> list[str]:
    """`train a llama 8b` and `qlora qwen3-8b`, with what says more of the model behind its name."""
    first = next((place for place, word in enumerate(words) if not _says_more(word)), 0)
    return [*words[first:], *words[:first]]


def _says_more(word: str) -> bool:
    return word.lower() in FILLERS or bool(_read_word(word.lower()))


def _join_counts(words: Sequence[str]) -> Iterator[str]:
    """The words, with a number and its unit as one: `3 epochs`."""
    left = list(words)
    while left:
        word = left.pop(0)
        if left and word[0].isdigit() and left[0].lower() in UNITS:
            unit = left.pop(0)
            word = word if LENGTH.fullmatch(word) and unit == "tokens" else f"{word} {unit}"
        yield word


def _find_ends(words: list[str]) -> Iterator[int]:
    """How many words are a model's name: the most; then those before one that says more of it."""
    for end in range(len(words), 0, -1):
        if is_planned(" ".join(words[:end])):
            yield end
    for end in range(1, len(words)):
        if _says_more(words[end]):
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
    if word == "pretraining":
        return {"task.objective": "pretrain"}
    if word == "scratch":
        return {"weights": "random"}
    if word.startswith("$"):
        return {"limits.cost": word}
    if (counted := COUNTED.fullmatch(word)) and (key := UNITS.get(counted[2])):
        return {key: word if key == "limits.time" else counted[1].upper()}
    return {"task.sequence_length": word} if LENGTH.fullmatch(word) else {}


def _refuse_words(name: str, words: list[str], rest: list[str]) -> list[str]:
    """All words as one name, of which the catalogue may know more; raises InvalidRequest else."""
    from memfit import catalog
    from memfit.catalog.device_names import say_instead

    whole, left = " ".join(words), [word for word in rest if not _read_word(word.lower())]
    unknown = " ".join(_leave_device_out(left))
    try:
        catalog.find_model(whole)
    except UnknownName as error:
        named = shlex.quote(name)
        such = f"such as `memfit plan {named} qlora 8k on 4090`; `memfit devices` lists devices"
        if not unknown:
            raise InvalidRequest(
                f"`{shorten_name(' '.join(rest))}` after `{name}` is not one method, objective,"
                " length and device", hint=such,
            ) from error  # fmt: skip
        hint = say_instead(unknown) or describe_option(unknown.lower(), True, None) or such
        raise InvalidRequest(
            f"`{shorten_name(unknown)}` after `{name}` is no method, objective, length or device",
            hint=hint,
        ) from error
    except InvalidRequest:
        pass  # it says more of the name, where it is read
    return [whole]


def _leave_device_out(words: Sequence[str]) -> Sequence[str]:
    """The words without the most of them that together are a device."""
    for size in range(len(words), 0, -1):
        for start in range(len(words) - size + 1):
            if _names_device(" ".join(words[start : start + size])):
                return [*words[:start], *words[start + size :]]
    return words


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


def describe_option(name: str, typed: Any, ctx: click.Context | None) -> str:
    """How an option that the verb has not is typed; "" for one of no known meaning.

    typed: its value, or True where none was typed.
    """
    from memfit.files.flags import COUNT, find_flag, type_key

    answer = _read_option(name.lstrip("-").replace("-", "_"), typed)
    if answer is None:
        return ""
    known = {own for param in ctx.command.params for own in param.opts} if ctx else {"--set"}
    here = []
    for key, value in answer.changes.items():
        flag = find_flag(key)
        if flag and f"--{flag.names[0]}" in known:
            metavar = f"--{flag.names[0]} {flag.metavar}"
            here.append(metavar if value is True else shlex.join(type_key(key, value)))
        elif "--set" not in known:
            path = ctx.command_path if ctx else "memfit"
            return f"`{path}` reads no such setting; `memfit plan` does"
        else:
            here.append(f"--set {key}=…" if value is True else _type_set(key, value))
    if not here:
        return answer.note
    line = f"that is `{' '.join(here)}` here"
    # a request counts the devices of a machine, and `--gpus` all
    return line if not answer.note or COUNT in answer.changes else f"{line}; {answer.note}"


def _type_set(key: str, value: Any) -> str:
    from memfit.core.wording import as_yaml

    return f"--set {shlex.quote(f'{key}={as_yaml(value)}')}"


def _read_option(word: str, typed: Any) -> Answer | None:
    """An option that is another trainer's word, an objective, a framework, or a request's key."""
    from memfit.files.request_file import KEYS
    from memfit.plan.frameworks import frameworks
    from memfit.records.other_words import ELSEWHERE, TASKS, WORDS, Answer

    if word in WORDS:
        return WORDS[word](typed)
    if word in TASKS:
        return Answer({"task.objective": word})
    if (framework := word.replace("_", "-")) in frameworks.names():
        return Answer({"framework": framework})
    if elsewhere := ELSEWHERE["framework"].get(word):
        return elsewhere
    keys = [key for key in KEYS if word in (key, key.rpartition(".")[2], key.replace(".", "_"))]
    keys = [key for key in keys if key == word] or keys
    return Answer({keys[0]: typed}) if len(keys) == 1 else None


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
