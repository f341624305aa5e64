"""Where a text may be cut and still have the same tokens.

Byte-level tokenizers first split a text by an expression, and then encode what is between. The
expressions below end a run of letters where a space follows, and look at nothing before the place
where they stand, so that the split of a text is that of its two halves. Short pieces are encoded
faster than long ones, and hold less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

PIECE = 2000  # characters
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
EXPRESSIONS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": rf"{_ENDS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_ENDS}|{_LETTERS}|\p{{N}}|{_REST}",
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_EDGE = re.compile(r"(?<=[^\W\d_])(?= )")


def may_be_cut(tokenizer: str) -> bool:
    """Whether a tokenizer, as the JSON of its file, is one whose texts may be cut before a space
    that follows a letter."""
    rules = json.loads(tokenizer)
    model, normalizer = rules["model"], rules["normalizer"]
    return bool(
        model["type"] == "BPE"
        and not model.get("dropout")
        # a composed letter is never made of a space
        and (normalizer is None or normalizer["type"] == "NFC")
        and _is_known(rules["pre_tokenizer"])
        and not any(_looks_around(token) for token in rules["added_tokens"])
    )


def _is_known(splitting: dict[str, Any] | None) -> bool:
    steps = (splitting or {}).get("pretokenizers", [splitting])
    if any(step is None or step["type"] not in ("Split", "ByteLevel") for step in steps):
        return False
    splits = [step for step in steps if step["type"] == "Split"]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(steps) != len(splits) + 1:
        return False
    if not splits:
        return bool(last["use_regex"])  # GPT-2's own
    (split, *more) = splits
    return not more and bool(
        split["pattern"].get("Regex") in EXPRESSIONS.values()
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not last["use_regex"]
    )


def _looks_around(token: dict[str, Any]) -> bool:
    """Whether a token of a text's own may stand on both sides of a cut, or swallow its space."""
    text = token["content"]
    around = token["lstrip"] or token["rstrip"] or token["single_word"]
    return bool(around or any(c.isspace() for c in text))


def cut(text: str) -> Iterator[str]:
    """Pieces of about `PIECE` characters; a longer one where no letter is followed by a space."""
    start = 0
    while len(text) - start > 2 * PIECE:
        edge = _EDGE.search(text, start + PIECE)
        if edge is None:
            break
        yield text[start : edge.start()]
        start = edge.start()
    yield text[start:]
