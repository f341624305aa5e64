"""The settings of generation, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.core.errors import InvalidRequest
from memfit.records import Record
from memfit.records.reinforcement import PREFILL_TOKENS

Ended = Literal["stop_token", "stop_word", "length", "positions"]


class Settings(Record, frozen=True, kw_only=True):
    """Bounds, sampling and stops. `rows` and `max_prompt` and `max_new_tokens` size the slots.

    Filters stand in Hugging Face's order: penalty, temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int
    rows: int = 8  # in flight at most
    answers: int = 1  # to each prompt; they share its prefill
    # tokens, and what every prompt counts as in `prefill_tokens`; 0 = as many as the longest has
    max_prompt: int = 0
    # of one prefill at most, padding included; one prompt at least
    prefill_tokens: int = PREFILL_TOKENS
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # 0 = all tokens
    top_p: float = 1.0  # the likeliest tokens that have this share together
    min_p: float = 0.0  # tokens at least so likely as this share of the likeliest one's chance
    repetition_penalty: float = 1.0  # of tokens that the row has, prompt included
    stop_tokens: tuple[int, ...] = ()
    stop_words: tuple[str, ...] = ()  # texts; they need `decode`
    limits: tuple[int, ...] = ()  # of each answer, where they differ; each at most max_new_tokens
    seed: int = 0
    first: int = 0  # the number of the first prompt, of which its draws depend
    fixed_shapes: bool = False  # every decoding step computes all slots at their full length
    reach: int = 1  # what a decoding step attends to is rounded up to a multiple of so many tokens

    def check(self) -> None:
        """Raise InvalidRequest for a number that is out of its range."""
        least = {
            "max_new_tokens": 1, "rows": 1, "answers": 1, "max_prompt": 0, "prefill_tokens": 1,
            "temperature": 0, "top_k": 0, "min_p": 0, "reach": 1,
        }  # fmt: skip
        for key, low in least.items():
            if not getattr(self, key) >= low:  # so written, a NaN is refused too
                _refuse(key, getattr(self, key), f"a number from {low} on")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        if not self.min_p <= 1:
            _refuse("min_p", self.min_p, "from 0 to 1")
        if not self.repetition_penalty > 0:
            _refuse("repetition_penalty", self.repetition_penalty, "above 0")
        if "" in self.stop_words:
            _refuse("stop_words", "", "texts that are not empty")


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: its tokens, the stop token included, and why it ended.

    log_probs: of each token under the model's logits divided by the temperature (by 1 at
    temperature 0), before the penalty and the filters: what a training forward recomputes.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended: Ended


def _refuse(key: str, value: object, wanted: str) -> None:
    raise InvalidRequest(f"`{key}: {value}` of generation is not {wanted}")
