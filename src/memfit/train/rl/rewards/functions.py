"""Reward functions that ship, in TRL's signature: lists of answers in, a number or None each out.

None says that a function cannot judge an answer. Nothing an answer says is ever evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Judge = Callable[..., list[float | None]]

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
THOUGHT = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
MOST_DIGITS = 1000  # of a number that is compared


def number(column: str = "") -> Judge:
    """1 where the last number of an answer is that of a column (`answer`), else 0."""
    name = column or "answer"

    def judge(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        truths = [_last_number(str(t)) for t in _column(columns, name, "number")]
        numbers = [_last_number(text_of(c)) for c in completions]
        return [
            None if truth is None else float(found == truth)
            for found, truth in zip(numbers, truths, strict=True)
        ]

    return judge


def regex(pattern: str) -> Judge:
    """1 where a pattern is found in an answer, else 0."""
    if not pattern:
        raise ValueError("`regex` without a pattern: write `regex:PATTERN`")
    wanted = re.compile(pattern, re.DOTALL)

    def judge(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(wanted.search(text_of(c)) is not None) for c in completions]

    return judge


def thoughts(_: str = "") -> Judge:
    """1 where an answer begins with one <think>…</think>, else 0: `think_format_reward` of TRL."""

    def judge(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(THOUGHT.match(text_of(c)) is not None) for c in completions]

    return judge


def length(room: str = "") -> Judge:
    """0 for short answers, down to -1 for those as long as they may be (2503.14476, equation 13).

    room: tokens below the limit within which it falls; a fifth of the limit by default.
    """

    def judge(
        completion_ids: Sequence[Sequence[int]], max_completion_length: int, **_: Any
    ) -> list[float | None]:
        limit = max_completion_length
        soft = int(room) if room else max(1, limit // 5)
        return [min(0.0, max(-1.0, (limit - soft - len(ids)) / soft)) for ids in completion_ids]

    return judge


BUILT_IN: dict[str, Callable[[str], Judge]] = {
    "number": number, "regex": regex, "format": thoughts, "length": length,
}  # fmt: skip


def text_of(completion: Any) -> str:
    """An answer's text, be it text itself or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


def _last_number(text: str) -> Fraction | None:
    found = NUMBER.findall(text)
    if not found or len(found[-1]) > MOST_DIGITS:
        return None
    try:
        return Fraction(found[-1].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _column(columns: dict[str, Any], name: str, asking: str) -> Sequence[Any]:
    if name not in columns:
        raise KeyError(f"`{asking}` compares with the data's column `{name}`, which is not there")
    values: Sequence[Any] = columns[name]
    return values
