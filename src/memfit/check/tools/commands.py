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
    PLAIN,
    TRL,
    ConfigReading,
    Reader,
    find_named,
    read_file,
    read_written,
    readers,
)
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
OF_TRL = frozenset((
    "max_length", "use_peft", "packing", "padding_free", "assistant_only_loss", "beta", "lora_r",
    "completion_only_loss", "num_generations", "lora_target_modules", "load_in_4bit",
    "load_in_8bit",
))  # fmt: skip
# of programs over transformers' Trainer: tokens of a row, and what moves no memory
LENGTHS = frozenset(
    ("model_max_length", "block_size", "max_seq_length", "max_seq_len", "cutoff_len")
)
OWN = frozenset((
    "data_path", "eval_data_path", "data_dir", "train_file", "validation_file", "lazy_preprocess",
    "preprocessing_num_workers", "overwrite_cache", "cache_dir",
))  # fmt: skip
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
        return file.suffix in COMMANDS and bool(find_commands(read_text(file)))

    def load(self, file: Path, config: str) -> dict[str, Any]:
        """The parts of the command, as `Command` names them."""
        self.refuse_config(file, config)
        every = find_commands(read_text(file))
        found = [one for one in every if one.files or _find_reader(one.arguments, file)] or every
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
        put_objective(_find_objective(command.program), command.program, taken.file, reading)
        for name in command.files:
            reading.started = read_file(find_named(name, taken.file), reading)
        if not command.files or command.arguments:
            read_arguments(command, taken, reading)

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """See `Reader.edits`."""
        arguments = data["arguments"]
        if not _names_trl(data["program"], arguments):
            arguments = {"gradient_checkpointing": False, **arguments}
        reader = _find_reader(arguments, Path())
        return reader.edits(arguments) if reader else ()

    def change(self, data: dict[str, Any], key: str, value: Any) -> None:
        """See `Reader.change`: a key is an argument."""
        put(data["arguments"], key, value)


def find_commands(text: str) -> list[Command]:
    """The commands of a shell script that start a trainer, with its variables put in."""
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
    if not arguments and not positional:
        return None  # a program of which nothing is said
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
    _read_as(readers.find("accelerate"), data, taken, reading)
    if not stated:
        reading.world = 0  # as many as there are devices


def _find_objective(program: str) -> str:
    """What the program's name says of what is learned; "" where it says nothing, or several."""
    text = "_".join(["", *re.findall("[a-z0-9]+", Path(program).name.lower()), ""])
    found = [name for name in objectives.names() if f"_{name}_" in text]
    named = [name for name in found if not any(name in other for other in found if other != name)]
    return named[0] if len(named) == 1 else ""


def put_objective(objective: str, program: str, file: Path, reading: ConfigReading) -> None:
    """Set what a program trains, which its arguments do not say, unless the command line does."""
    if objective and reading.get("task.objective") is None:
        reading.put("task.objective", objective)
        reading.overrides["task.objective"] = objective
        reading.assume(f"`{program}` of `{file}` trains `task.objective: {objective}`")


def _find_reader(data: Mapping[str, Any], file: Path) -> Reader | None:
    """Whose arguments these are."""
    names = ("axolotl", "llamafactory", "trl")
    if "config" in data:  # TRL's, a file whose keys these arguments change
        return readers.find("trl")
    found = (readers.find(name) for name in names)
    return next((reader for reader in found if reader.recognises(data, file)), None)


def read_arguments(
    command: Command, taken: ConfigKeys, reading: ConfigReading, *, plain: bool | None = None
) -> None:
    """The program's arguments, read as the trainer's own file is.

    plain: whether it is transformers' own Trainer; None: by the program's name and its arguments.
    """
    data = dict(command.arguments)
    if name := data.pop("config", ""):
        data = {**read_written(find_named(str(name), taken.file)), **data}
    reader = _find_reader(data, taken.file)
    if reader is None:
        raise InvalidRequest(
            f"`{command.program}` in `{taken.file}` is started with arguments of no trainer that"
            " memfit reads",
            hint="TRL's and transformers' are read (`--model_name_or_path`, `--max_length`),"
            " axolotl's and LLaMA-Factory's",
        )
    if reading.model:  # of the command line, in place of the script's
        data = {key: value for key, value in data.items() if key != "model_name_or_path"}
    _refuse_variables(data, reader, taken.file)
    own = reader.title
    if plain is None:
        plain = own == TRL and not _names_trl(command.program, data)
    if plain:
        own = "transformers' Trainer"  # whose defaults are others
        data = {"gradient_checkpointing": False, "bf16": False, **data}
        data = {("max_length" if k in LENGTHS else k): v for k, v in data.items() if k not in OWN}
        if reading.sharded == "deepspeed" or "deepspeed" in data:
            reading.put("options.trl", "")
        elif reading.get("framework") is None:
            reading.overrides["framework"] = reading.data["framework"] = PLAIN
    _read_as(reader, data, taken, reading)
    reading.started = reader.title
    reading.assume(f"arguments of `{command.program}` mean what they do in {own}")


def _read_as(
    reader: Reader, data: dict[str, Any], taken: ConfigKeys, reading: ConfigReading
) -> None:
    """Keys that the command has in place of a file of this tool's."""
    inner = ConfigKeys(data, taken.file)
    reader.read(inner, reading)
    inner.settle(reader.still, reader.moved)
    taken.undescribed += inner.undescribed


def _names_trl(program: str, data: Mapping[str, Any]) -> bool:
    """Whether a program is TRL's by its name, or by arguments that transformers does not have."""
    words = re.split(r"[^a-z0-9]+", program.lower())
    return bool({"trl", *objectives.names()} & {*words} or OF_TRL & data.keys())


def _refuse_variables(data: Mapping[str, Any], reader: Reader, file: Path) -> None:
    """Raise InvalidRequest for an argument whose value is a variable that the file does not set."""
    for key, value in data.items():
        if isinstance(value, str) and "$" in value and key not in reader.still:
            raise InvalidRequest(
                f"`--{key} {value}` in `{file}`: the file does not set that variable",
                hint="write the value in its place, or set the variable in a line above",
            )


readers.register("commands")(CommandsReader())
