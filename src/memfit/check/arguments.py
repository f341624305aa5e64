"""Arguments of a program that trains, read as the trainer's own file is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.check import PLAIN, TRL, ConfigReading, Reader, find_named, read_written, readers
from memfit.check.keys import ConfigKeys
from memfit.core.errors import InvalidRequest
from memfit.objectives import objectives

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


def put_objective(objective: str, program: str, file: Path, reading: ConfigReading) -> None:
    """Set what a program trains, which its arguments do not say, unless the command line does."""
    if objective and reading.get("task.objective") is None:
        reading.put("task.objective", objective)
        reading.overrides["task.objective"] = objective
        reading.assume(f"`{program}` of `{file}` trains `task.objective: {objective}`")


def find_reader(data: Mapping[str, Any], file: Path) -> Reader | None:
    """Whose arguments these are."""
    names = ("axolotl", "llamafactory", "trl")
    if "config" in data:  # TRL's, a file whose keys these arguments change
        return readers.find("trl")
    found = (readers.find(name) for name in names)
    return next((reader for reader in found if reader.recognises(data, file)), None)


def read_arguments(
    program: str,
    arguments: Mapping[str, Any],
    taken: ConfigKeys,
    reading: ConfigReading,
    *,
    plain: bool | None = None,
) -> None:
    """The program's arguments, read as the trainer's own file is.

    plain: whether it is transformers' own Trainer; None: by the program's name and its arguments.
    """
    data = dict(arguments)
    if name := data.pop("config", ""):
        data = {**read_written(find_named(str(name), taken.file)), **data}
    reader = find_reader(data, taken.file)
    if reader is None:
        raise InvalidRequest(
            f"`{program}` in `{taken.file}` is started with arguments of no trainer that"
            " memfit reads",
            hint="TRL's and transformers' are read (`--model_name_or_path`, `--max_length`),"
            " axolotl's and LLaMA-Factory's",
        )
    if reading.model:  # of the command line, in place of the script's
        data = {key: value for key, value in data.items() if key != "model_name_or_path"}
    _refuse_variables(data, reader, taken.file)
    own = reader.title
    if plain is None:
        plain = own == TRL and not names_trl(program, data)
    if plain:
        own = "transformers' Trainer"  # whose defaults are others
        data = {"gradient_checkpointing": False, "bf16": False, **data}
        data = {("max_length" if k in LENGTHS else k): v for k, v in data.items() if k not in OWN}
        if reading.sharded == "deepspeed" or "deepspeed" in data:
            reading.put("options.trl", "")
        elif reading.get("framework") is None:
            reading.overrides["framework"] = reading.data["framework"] = PLAIN
    read_as(reader, data, taken, reading)
    reading.started = reader.title
    reading.assume(f"arguments of `{program}` mean what they do in {own}")


def read_as(
    reader: Reader, data: dict[str, Any], taken: ConfigKeys, reading: ConfigReading
) -> None:
    """Keys that the command has in place of a file of this tool's."""
    inner = ConfigKeys(data, taken.file)
    reader.read(inner, reading)
    inner.settle(reader.still, reader.moved)
    taken.undescribed += inner.undescribed


def names_trl(program: str, data: Mapping[str, Any]) -> bool:
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
