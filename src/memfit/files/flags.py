"""The flags of the command line, which are keys of the request and words of the Python interface.

One table makes them all. This module imports nothing that a command's `--help` would wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memfit.core.devices_as_written import read_devices
from memfit.core.errors import InvalidRequest
from memfit.core.wording import as_yaml

QLORA = "qlora"  # of `method`: lora over a base in nf4
DEVICE, COUNT, NODES, MEMORY = (
    "hardware.device", "hardware.count", "hardware.nodes", "limits.memory",
)  # fmt: skip


class Flag(NamedTuple):
    """One flag: its names, the key of the request that it sets, and its help."""

    names: tuple[str, ...]  # without dashes; the first is printed in commands
    key: str
    metavar: str  # "" for a switch, which sets `value`
    help: str
    value: str = ""
    words: bool = False  # whether its values are words of memfit's own, in lower case

    @property
    def number(self) -> bool:
        """Whether a number alone is a value of it."""
        return self.metavar in ("N", "TOKENS", "ROWS", "COUNT", "RATE")

    @property
    def parameter(self) -> str:
        """The name of its parameter in Python."""
        return self.names[0].replace("-", "_")


FLAGS = (
    Flag(("device", "gpu"), DEVICE, "NAME",
         "accelerator, and how many: h100-sxm, A100, 8xH100, H100:8, p5.48xlarge;"
         " see `memfit devices`"),
    Flag(("gpus", "count", "num-gpus"), COUNT, "N",
         "devices; more than a machine holds are several nodes, unless --nodes is given"),
    Flag(("nodes", "num-nodes"), NODES, "N", "machines, of --gpus devices each"),
    Flag(("memory",), MEMORY, "SIZE", "memory limit, such as '72 GiB'"),
    Flag(("method", "finetuning-type"), "method", "NAME",
         "full, lora, qlora (lora with base_format: nf4), dora or freeze", words=True),
    Flag(("qlora", "load-in-4bit"), "method", "", "lora with base_format: nf4", value=QLORA),
    Flag(("lora",), "method", "", "lora", value="lora"),
    Flag(("dora",), "method", "", "dora", value="dora"),
    Flag(("full",), "method", "", "every weight is trained", value="full"),
    Flag(("lora-rank", "lora-r", "rank"), "lora.rank", "N", "rank of the adapters"),
    Flag(("seq-len", "seq", "sequence-length", "sequence-len", "max-seq-length", "max-length",
          "cutoff-len", "context-length"), "task.sequence_length", "TOKENS",
         "tokens of a row, such as 4096 or 4k"),
    Flag(("batch", "micro-batch", "batch-size", "micro-batch-size",
          "per-device-train-batch-size"),
         "micro_batch", "ROWS", "rows of a micro-batch on each device"),
    Flag(("global-batch", "global-batch-size"), "task.global_batch", "ROWS",
         "rows of an optimizer step, of all devices"),
    Flag(("steps", "max-steps"), "task.steps", "N", "optimizer steps"),
    Flag(("tokens",), "task.tokens", "COUNT", "tokens to train on, such as 50M"),
    Flag(("epochs", "num-train-epochs"), "task.epochs", "N", "passes over the data"),
    Flag(("save-every", "save-steps"), "run.save_every", "N",
         "steps between checkpoints; below 1 a share of the run"),
    Flag(("evaluate-every", "eval-every", "eval-steps"), "run.evaluate_every", "N",
         "steps between evaluations of the held-out data"),
    Flag(("data", "dataset"),
         "task.data", "PATH", "text, JSON, JSONL, CSV or parquet file, or a folder of them"),
    Flag(("objective",), "task.objective", "NAME",
         "pretrain, sft, dpo, simpo, orpo, cpo, kto, reward, grpo, rloo, ppo or online_dpo",
         words=True),
    Flag(("dpo",), "task.objective", "", "preferences: pairs of answers", value="dpo"),
    Flag(("grpo",), "task.objective", "", "rewards of sampled answers", value="grpo"),
    Flag(("ppo",), "task.objective", "", "rewards of sampled answers, and a value model",
         value="ppo"),
    Flag(("num-generations",), "rollout.num_generations", "N", "answers to a prompt"),
    Flag(("max-prompt-length",), "rollout.max_prompt_length", "TOKENS", "tokens of a prompt"),
    Flag(("max-completion-length",), "rollout.max_completion_length", "TOKENS",
         "tokens of a sampled answer"),
    Flag(("precision", "mixed-precision"),
         "precision", "NAME", "fp32, bf16, bf16-mixed, fp16-mixed, …", words=True),
    Flag(("optimizer", "optim"), "optimizer.name", "NAME", "adamw, adamw8bit, muon, …", words=True),
    Flag(("lr", "learning-rate"), "optimizer.learning_rate", "RATE", "such as 2e-4"),
    Flag(("seed",), "seed", "N", "of weights, data and sampling"),
    Flag(("framework", "trainer"), "framework", "NAME",
         "whose step it is: memfit, trl, hf-trainer, torchtitan, megatron, …", words=True),
)  # fmt: skip
BY_WORD = {name.replace("-", "_"): flag for flag in FLAGS for name in flag.names}
_BY_KEY = {flag.key: flag for flag in reversed(FLAGS) if flag.metavar}
# what `memfit solve` calls the keys that it solves for
SOLVED = {"task.sequence_length": "sequence_length", "micro_batch": "micro_batch", COUNT: "devices"}


def find_flag(key: str) -> Flag | None:
    """The flag that sets a key of the request; None where only `--set` does."""
    return _BY_KEY.get(key)


def find_field(word: str) -> str:
    """The field to solve for that a word names; the word itself where no flag has that name."""
    flag = BY_WORD.get(word.lower().replace("-", "_"))
    return SOLVED.get(flag.key if flag else word, word.replace("-", "_"))


def type_key(key: str, value: Any) -> list[str]:
    """A key of the request as its flag, where it has one that takes the value; else as `--set`."""
    flag = find_flag(key)
    text = as_yaml(value)
    if flag is None or text != str(value):  # a list, or a text that only YAML's quotes can hold
        return ["--set", f"{key}={text}"]
    return [f"--{flag.names[0]}", text]


def gather(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's keys that flags and `--set` set; values: flag's parameter -> value.

    Raises InvalidRequest for an empty text, and where two of them set one key differently.
    """
    keys: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for flag in FLAGS:
        value = values.get(flag.parameter)
        if value is None or value is False:
            continue
        value = flag.value or (value.strip() if isinstance(value, str) else value)
        written = f"--{flag.names[0]}" + ("" if flag.value else f" {value}")
        if value == "":
            raise InvalidRequest(
                f"`--{flag.names[0]}` is empty, and it sets `{flag.key}`",
                hint=f"give a value ({flag.help}), or leave the flag out",
            )
        if flag.words and isinstance(value, str):
            value = value.lower()
        if keys.get(flag.key) == "lora" and value == QLORA:  # which is lora, and a base in nf4
            del keys[flag.key]
        _put(keys, origin, flag.key, value, written)
    for key, value in changes.items():
        _put(keys, origin, key, value, f"--set {key}={value}")
    return _join_count(_name_device(keys, origin), origin)


def _name_device(keys: dict[str, Any], origin: dict[str, str]) -> dict[str, Any]:
    """`--gpus 2xL40S` names the device too."""
    text = keys.get(COUNT)
    if not isinstance(text, str) or origin[COUNT].startswith("--set"):
        return keys
    if not any(letter.isalpha() for letter in read_devices(text).name):
        return keys
    if DEVICE in keys:
        raise InvalidRequest(
            f"`{origin[DEVICE]}` and `{origin[COUNT]}` both name the device",
            hint="keep one of the two, or give `--gpus` a number",
        )
    origin[DEVICE] = origin[COUNT]
    return {**{key: value for key, value in keys.items() if key != COUNT}, DEVICE: text}


def _put(keys: dict[str, Any], origin: dict[str, str], key: str, value: Any, written: str) -> None:
    if key == DEVICE and type(value) is int:
        value = str(value)  # `4090`, which YAML reads as a number
    if key in keys and str(keys[key]).lower() != str(value).lower():
        raise InvalidRequest(
            f"`{origin[key]}` and `{written}` both set `{key}`", hint="keep one of the two"
        )
    keys[key] = value
    origin[key] = written


def _join_count(keys: dict[str, Any], origin: Mapping[str, str]) -> dict[str, Any]:
    """`--gpus 64 --device h100` as `h100:64`, which is laid out in machines when it is read."""
    device, count = keys.get(DEVICE), keys.get(COUNT)
    if not isinstance(device, str) or count is None:
        return keys
    own = read_devices(device)
    if own.number and str(own.number) != str(count):
        raise InvalidRequest(
            f"`{origin[DEVICE]}` and `{origin[COUNT]}` both say how many devices there are",
            hint=f"`--device {own.name} {origin[COUNT]}`, or `--device {own.name}:{own.number}`",
        )
    from memfit.catalog.machines import find_machine  # the catalogue, which `--help` does without

    if machine := find_machine(own.name):
        keys = {**keys, DEVICE: f"{machine.device}:{count}"}
        del keys[COUNT]
        return keys
    joined = not own.number and NODES not in keys and not origin[COUNT].startswith("--set")
    if joined and str(count).isdecimal() and str(count).strip("0"):
        keys = {**keys, DEVICE: f"{device}:{count}"}
        del keys[COUNT]
    return keys
