"""Files that `memfit check` cannot read, each with what its user can do instead."""

from __future__ import annotations

import json
import re
from pathlib import Path

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_text, shorten

# folders that tools bring their users, and how one comes by them
BROUGHT = {
    "deepspeed_configs/": "`axolotl fetch deepspeed_configs` writes it here",
    "examples/deepspeed/": "LLaMA-Factory's repository has it: run `memfit check` in a clone of it",
}
COMMANDS = (".sh", ".bash")
_SCRIPT = re.compile(
    r"^\s*(?:from|import)\s+(?:transformers|trl|unsloth|peft|datasets|accelerate|deepspeed"
    r"|lightning|pytorch_lightning|torchtune|axolotl)\b",
    re.MULTILINE,
)
_UNSLOTH = re.compile(r"\b(?:from|import)\s+unsloth\b")


def refuse_missing(name: str, beside: Path) -> InvalidRequest:
    """The error of a file that another names and that is nowhere here."""
    brought = next((hint for place, hint in BROUGHT.items() if place in name), "")
    return InvalidRequest(
        f"`{beside}` names `{shorten(name)}`, which is not here",
        hint=brought or f"run from where `{shorten(name)}` can be found, as the tool itself is",
    )


def refuse_json(file: Path) -> None:
    """Raise InvalidRequest with the place where a text stops being JSON; not of text that is."""
    try:
        json.loads(read_text(file))
    except RecursionError:
        return
    except ValueError as error:
        raise InvalidRequest(
            f"`{file}` is not JSON: {error}",
            hint="a quote or a bracket stays open, a comma is too many, or the file was cut short",
        ) from None


def is_script(file: Path) -> bool:
    """Whether a Python file trains with another library, rather than configures torchtitan."""
    text = read_text(file)
    return bool(_SCRIPT.search(text)) and "torchtitan" not in text


def is_of_unsloth(file: Path) -> bool:
    """Whether a program imports Unsloth, which puts its own step in the place of TRL's."""
    return bool(_UNSLOTH.search(read_text(file)))


def refuse_program(file: Path) -> InvalidRequest:
    """The error of a script or a command, whose settings are known where it runs."""
    if file.suffix in COMMANDS:
        return InvalidRequest(
            f"`{file}` holds no command that starts a trainer with arguments",
            hint="read are `accelerate launch`, `torchrun`, `deepspeed` and `python` with a program"
            " and its arguments, `trl sft …`, `llamafactory-cli train …` and `axolotl train …`",
        )
    if is_of_unsloth(file):
        return InvalidRequest(
            f"`{file}` is a program for Unsloth, whose step is not described",
            hint="`memfit plan MODEL --device NAME --qlora` plans memfit's own step; Unsloth's"
            " kernels hold other tensors",
        )
    return InvalidRequest(
        f"`{file}` is a program that makes no trainer of TRL's or transformers' in plain sight",
        hint="write its arguments as TRL's YAML (`model_name_or_path: …`, `max_length: …`,"
        " `use_peft: true`) and name that file; or let `memfit.MemoryCallback` check in the script"
        " itself, before its first step (docs/api.md)",
    )
