"""Texts of a request that say a number or two keys: `8k` tokens, `50M`, `method: qlora`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memfit.base_formats import is_quantised_in, offered_formats
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import DIGITS

# whole numbers, with the number that `k` stands for: rows are as long as powers of two
COUNTS = {
    "task.sequence_length": 1024, "task.global_batch": 1000, "task.steps": 1000,
    "task.tokens": 1000, "micro_batch": 1000, "hardware.count": 1000, "hardware.nodes": 1000,
    "optimizer.warmup_steps": 1000, "rollout.max_prompt_length": 1024,
    "rollout.max_completion_length": 1024,
}  # fmt: skip
_COUNT = re.compile(r"\d.*")
_WORDS = re.compile(r"\s*(tokens|steps|rows|sequences|gpus)$", re.IGNORECASE)
_THOUSANDS = re.compile(r"(\d+(?:\.\d+)?)\s*[kK]")


def read_looser(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same data as the types of a request have it; what cannot be read stays as it stands.

    Raises InvalidRequest where `method: qlora` and `base_format` disagree.
    """
    made = dict(data)
    for key in COUNTS:
        group, _, name = key.rpartition(".")
        holder = made.get(group) if group else made
        if not isinstance(holder, Mapping) or not isinstance(holder.get(name), str):
            continue
        changed = {**holder, name: read_count(key, holder[name])}
        made = {**made, group: changed} if group else changed
    hardware = made.get("hardware")
    # 4090, which YAML reads as a number
    if isinstance(hardware, Mapping) and type(hardware.get("device")) is int:
        made["hardware"] = {**hardware, "device": str(hardware["device"])}
    return _settle_qlora(made)


def read_count(key: str, text: str) -> int | str:
    """`50M` -> 50,000,000, and `8k` tokens of a row -> 8,192; a text that is no number stays."""
    bare = _WORDS.sub("", text.strip())
    if len(bare) > DIGITS or not _COUNT.fullmatch(bare):
        return text
    if (match := _THOUSANDS.fullmatch(bare)) and COUNTS[key] == 1024:
        found = float(match[1]) * 1024
    else:
        try:
            found = units.parse_count(bare)
        except InvalidRequest:
            return text
    return int(found) if found == int(found) else text


def _settle_qlora(data: dict[str, Any]) -> dict[str, Any]:
    method = data.get("method")
    if not isinstance(method, str) or method.lower() != "qlora":
        return data
    stated = data.get("base_format", "auto")
    if stated != "auto" and not (isinstance(stated, str) and is_quantised_in(4, stated)):
        raise InvalidRequest(
            f"`method: qlora` is lora over a base in 4 bits, and `base_format: {stated}` is stated",
            hint="use `method: lora` with that format, or leave `base_format` out",
        )
    base = offered_formats()[-1] if stated == "auto" else stated
    return {**data, "method": "lora", "base_format": base}
