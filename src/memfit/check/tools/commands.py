"""Shell scripts that start a trainer: `accelerate launch train.py --max_length 4096 …`.

The arguments are those of the trainer's own file, and those before the program are the launcher's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

from memfit.check import (
    ConfigReading,
    Reader,
    find_named,
    find_place,
    read_file,
    read_written,
    readers,
)
from memfit.check.arguments import find_reader, names_trl, put_objective, read_arguments, read_as
from memfit.check.keys import ConfigKeys
from memfit.check.refused_files import COMMANDS
from memfit.check.smaller_changes import Edit
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_text
from memfit.objectives import objectives
from memfit.workflows.load_inputs import put

# options of launchers that take no value; of all others the next word is one
SWITCHES = frozenset((
    "multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "cpu", "no_python", "debug",
    "quiet", "q", "same_network", "mps", "standalone", "no_local_rank", "force_multi", "save_pid",
    "run_path",
))  # fmt: skip
BEFORE = frozenset(["srun", "nohup", "exec", "sudo", "env", "time", "uv", "poetry", "run"])
PYTHON = re.compile(r"(.*/)?python[\d.]*$")
LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
PLACES = ("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "zero3_init_flag",
          "offload_param_device", "gradient_accumulation_steps", "gradient_clipping",
          "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names")  # fmt: skip
KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
WORDS = {"true": True, "false": False, "none": None, "null": None}
MACHINES = ("nnodes", "num_nodes", "num_machines")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAMED = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_COMPUTED = re.compile(r"\$\([^()]*\)|`[^`]*`")  # what another command prints


class Command(NamedTuple):
    """One command that trains: its launcher's options, and what is started with which arguments."""

    launcher: str
    options: dict[str, Any]
    program: str  # `train.py`, `trl sft`, `llamafactory-cli`, `axolotl`
    arguments: dict[str, Any]
    files: tuple[str, ...]  # configurations among the program's words


@final
class CommandsReader(Reader):
    """A shell script's one command that trains."""

    name: ClassVar = "commands"
    title: ClassVar = "a script's command"

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return file.suffix in COMMANDS and bool(_find_known(file))

    def load(
        self, file: Path, config: str, arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The parts of the command, as `Command` names them."""
        self.refuse_config(file, config)
        every = _find_known(file)
        found = [one for one in every if one.files or find_reader(one.arguments, file)
                 or _find_program(one, file)] or every  # fmt: skip
        if len(found) > 1:
            named = ", ".join(f"`{one.program}`" for one in found)
            raise InvalidRequest(
                f"`{file}` holds {len(found)} commands that train: {named}",
                hint="keep the one that is asked about in a file of its own",
            )
        return found[0]._asdict()

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        command = Command(**{key: taken.data[key] for key in Command._fields})
        taken.data.clear()  # what it holds is read as the files of other tools are
        _read_launcher(command, taken, reading)
        known = command.files or find_reader(command.arguments, taken.file)
        if not known and (program := _find_program(command, taken.file)):
            read_file(program, reading, command.arguments)
            return
        put_objective(_find_objective(command.program), command.program, taken.file, reading)
        for name in command.files:
            reading.started = read_file(find_named(name, taken.file), reading)
        if not command.files or command.arguments:
            read_arguments(command.program, command.arguments, taken, reading)

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """See `Reader.edits`."""
        arguments = data["arguments"]
        if not names_trl(data["program"], arguments):
            arguments = {"gradient_checkpointing": False, **arguments}
        reader = find_reader(arguments, Path())
        return reader.edits(arguments) if reader else ()

    def change(self, data: dict[str, Any], key: str, value: Any) -> None:
        """See `Reader.change`: a key is an argument."""
        put(data["arguments"], key, value)


def _find_known(file: Path) -> list[Command]:
    """The commands whose arguments, files or programs say what is trained, or might."""
    return [one for one in find_commands(read_text(file))
            if one.arguments or one.files or _find_program(one, file)]  # fmt: skip


def _find_program(command: Command, file: Path) -> Path | None:
    """The program that a command starts, where it is here and makes a trainer."""
    path = find_place(command.program, file) if command.program.endswith(".py") else None
    return path if path and readers.find("programs").recognises({}, path) else None


def find_commands(text: str) -> list[Command]:
    """The commands of a shell script that may start a trainer, with its variables put in."""
    found, known = [], dict[str, str]()
    for tokens in _statements(_COMPUTED.sub("$?", re.sub(r"\\\r?\n", " ", text))):
        for words in _split(tokens, known):
            if command := _read_words(words):
                found.append(command)
    return found


def _statements(text: str) -> Iterable[list[str]]:
    """Words and operators of each line, or of the lines over which a quoted text goes."""
    lines = text.splitlines()
    while lines:
        for taken in range(1, len(lines) + 1):
            lexer = shlex.shlex("\n".join(lines[:taken]), posix=True, punctuation_chars=";&|<>")
            lexer.whitespace_split = True
            try:
                yield list(lexer)
            except ValueError:  # a quote is open
                continue
            break
        else:
            taken = 1  # it stays open: an apostrophe in a text that is no command
        lines = lines[taken:]


def _split(tokens: Sequence[str], known: dict[str, str]) -> Iterable[list[str]]:
    """The commands of one line as words; `known` are variables, and takes those that it sets."""
    command: list[str] = []
    for token in [*tokens, ";"]:
        if token and not set(token) <= set(";&|<>"):
            word = _substitute(token, known)
            several = _NAMED.fullmatch(token) and word.strip().startswith("-")
            command += word.split() if several else [word]  # as a shell splits what a name holds
            continue
        left = command[1:] if command[:1] == ["export"] else command
        while left and (assigned := _ASSIGNED.fullmatch(left[0])):
            if "$" not in assigned[2] or assigned[1] not in known:  # `$1` takes no default's place
                known[assigned[1]] = assigned[2]
            left = left[1:]
        if left:
            yield left
        command = []
        if token and token[0] in "<>":
            return  # what follows is a file


def _substitute(word: str, known: Mapping[str, str]) -> str:
    """Variables of the script in their places; those of elsewhere stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return known.get(name, match[0] if match[2] is None else match[2])

    return _NAMED.sub(value, word)


def _read_words(words: Sequence[str]) -> Command | None:
    """One command, if it starts a trainer."""
    left = list(words)
    while left and (left[0] in BEFORE or _ASSIGNED.fullmatch(left[0])):
        left = left[1:]
    launcher, options = "", dict[str, Any]()
    while left and (PYTHON.match(left[0]) or left[0] in LAUNCHERS):
        first, left = left[0], left[1:]
        if first in LAUNCHERS:
            launcher = first
            left = left[1:] if left[:1] == ["launch"] else left
        own, left = _take_options(left)
        module = own.pop("m", own.pop("module", None))
        if module == "torch.distributed.run":
            launcher = "torchrun"
        elif isinstance(module, str):
            left = [module, *left]
        options |= own
    if not left:
        return None
    program, left = left[0], left[1:]
    subcommands = {"trl": objectives.names(), "llamafactory-cli": ("train",), "axolotl": ("train",)}
    if program in subcommands:
        if not left or left[0] not in subcommands[program]:
            return None
        program, left = (f"trl {left[0]}" if program == "trl" else program), left[1:]
    elif not (program.endswith(".py") or "axolotl" in program or program.startswith("trl.")):
        return None
    files = tuple(word for word in left if word.endswith((".yaml", ".yml")))[:1]
    positional = bool(files) and left[:1] == list(files)
    arguments, _ = _take_options(left[1:] if positional else left, every=True)
    return Command(launcher, options, program, arguments, files if positional else ())


def _take_options(words: Sequence[str], *, every: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Options with their values, and the words behind them; every: a program's, of any number."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(words) and (words[at].startswith("-") or every):
        name, equals, value = words[at].lstrip("-").partition("=")
        name, at = name.replace("-", "_"), at + 1
        values = [value] if equals else []
        if not equals and (every or name not in SWITCHES):
            most = len(words) if every else 1
            while at < len(words) and len(values) < most and not _is_option(words[at]):
                values.append(words[at])
                at += 1
        read = [_read_value(one) for one in values]
        found[name] = True if not read else read[0] if len(read) == 1 else read
        if name in ("m", "module"):
            break  # its own arguments follow
    return found, list(words[at:])


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", word)


def _read_value(text: str) -> Any:
    """A number or a word of Python's, as argparse makes them of its types; else the text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read_launcher(command: Command, taken: ConfigKeys, reading: ConfigReading) -> None:
    """Processes and machines; of accelerate, its own file with the options over it."""
    options = command.options
    if command.launcher != "accelerate":
        each = options.get("nproc_per_node", options.get("num_gpus"))
        machines = next((options[key] for key in MACHINES if key in options), 1)
        if isinstance(each, int) and isinstance(machines, int):
            reading.world = each * machines
            if machines > 1 and reading.get("hardware.nodes") is None:
                reading.put("hardware.nodes", machines)
        return
    data: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    if name := options.get("config_file"):
        data = read_written(find_named(str(name), taken.file))
    for key, value in options.items():
        if key in KINDS:
            data["distributed_type"] = KINDS[key]
        elif key in PLACES or key.startswith("fsdp_"):
            inside = "fsdp_config" if key.startswith("fsdp_") else "deepspeed_config"
            data[inside] = {**(data.get(inside) or {}), key: value}
        elif key != "config_file" and key not in SWITCHES:
            data[key] = value
    stated = "num_processes" in data
    read_as(readers.find("accelerate"), data, taken, reading)
    if not stated:
        reading.world = 0  # as many as there are devices


def _find_objective(program: str) -> str:
    """What the program's name says of what is learned; "" where it says nothing, or several."""
    text = "_".join(["", *re.findall("[a-z0-9]+", Path(program).name.lower()), ""])
    found = [name for name in objectives.names() if f"_{name}_" in text]
    named = [name for name in found if not any(name in other for other in found if other != name)]
    return named[0] if len(named) == 1 else ""


readers.register("commands")(CommandsReader())
