"""Answers sampled from the model that is trained, adapters on: the slots of `train.generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memfit.records.reinforcement import PREFILL_TOKENS, Rollout
from memfit.train.generation.loop import generate_batch
from memfit.train.generation.sampling import Decoder, Read, read_token
from memfit.train.generation.settings import Completion, Settings
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.rl.rows import Ids
from memfit.train.step.build import Built
from memfit.train.step.step import autocast


class Sample(Protocol):
    """Samples one answer to each prompt; equal arguments and weights give equal answers."""

    def __call__(
        self, built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int
    ) -> list[Completion]:
        """end: the token that ends an answer; None: only its limit does."""


def sample_in_slots(
    built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int,
    *, limits: tuple[int, ...] = (), observer: Observer = NOBODY, read: Read = read_token,
    decode: Decoder | None = None,
) -> list[Completion]:  # fmt: skip
    """See `Sample`. A prompt that `num_generations` neighbours share is read once for all of them.

    The cache has the rollout's bounds, whatever the prompts' own lengths: `max_prompt_length` and
    `max_completion_length` tokens in each of `rows` slots. limits: of each answer, where they are
    lower. observer, read, decode: see `generate_batch`.
    """
    group = rollout.num_generations
    if not _come_in_groups(prompts, group):
        group = 1
    settings = Settings(
        max_new_tokens=rollout.max_completion_length, max_prompt=rollout.max_prompt_length,
        rows=rollout.in_flight(len(prompts)), answers=group, temperature=rollout.temperature,
        stop_tokens=() if end is None else (end,), seed=seed, limits=limits, reach=rollout.reach,
        top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty, stop_words=rollout.stop_words,
    )  # fmt: skip
    with autocast(built):
        return generate_batch(
            built.model, prompts[::group], settings, observer=observer, read=read, decode=decode
        )


def answer_greedily(
    built: Built, prompts: Sequence[Ids], rollout: Rollout, answers: int, end: int | None,
    *, observer: Observer = NOBODY, decode: Decoder | None = None,
) -> list[Completion]:  # fmt: skip
    """The likeliest token each time: one answer to each prompt, of any number of them.

    answers: of a rollout. No call is larger than the rollout's own: as many rows are in flight, and
    no more prompts are read at once, so that it holds no more memory.
    """
    rows = rollout.in_flight(answers)
    at_once = -(-rows // rollout.num_generations) * rollout.max_prompt_length
    settings = Settings(
        max_new_tokens=rollout.max_completion_length, max_prompt=rollout.max_prompt_length,
        rows=min(rows, len(prompts)), prefill_tokens=min(PREFILL_TOKENS, at_once), temperature=0.0,
        stop_tokens=() if end is None else (end,), reach=rollout.reach,
        repetition_penalty=rollout.repetition_penalty, stop_words=rollout.stop_words,
    )  # fmt: skip
    with autocast(built):
        return generate_batch(built.model, prompts, settings, observer=observer, decode=decode)


def _come_in_groups(prompts: Sequence[Ids], group: int) -> bool:
    alike = all(prompt == prompts[at - at % group] for at, prompt in enumerate(prompts))
    return len(prompts) % group == 0 and alike
