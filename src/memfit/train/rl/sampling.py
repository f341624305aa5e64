"""Answers sampled from the model that is trained, adapters on: the slots of `train.generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from memfit.parallelism import let_go
from memfit.records.reinforcement import PREFILL_TOKENS, Rollout
from memfit.train.distributed.ranks import Ranks
from memfit.train.generation.calls import Together
from memfit.train.generation.loop import generate_batch
from memfit.train.generation.sampling import Decoder, Read, read_token
from memfit.train.generation.settings import Completion, Settings
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.model.hugging_face import base_model
from memfit.train.rl.rows import Ids
from memfit.train.step.build import Built
from memfit.train.step.step import autocast


class Share(NamedTuple):
    """One rank's share of the prompts that all ranks answer."""

    first: int  # answers that ranks before this one sample
    ranks: Ranks


ALONE = Share(0, Ranks())


class Sample(Protocol):
    """Samples one answer to each prompt; equal arguments and weights give equal answers."""

    def __call__(
        self, built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int,
        *, share: Share = ALONE,
    ) -> list[Completion]:  # fmt: skip
        """end: the token that ends an answer; None: only its limit does. share: where these prompts
        stand among those of all ranks."""


def sample_in_slots(
    built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int,
    *, limits: tuple[int, ...] = (), observer: Observer = NOBODY, read: Read = read_token,
    decode: Decoder | None = None, share: Share = ALONE,
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
        first=share.first // group, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty, stop_words=rollout.stop_words,
    )  # fmt: skip
    return _generate(built, prompts[::group], settings, observer, read, decode, share.ranks)


def answer_greedily(
    built: Built, prompts: Sequence[Ids], rollout: Rollout, answers: int, end: int | None,
    *, observer: Observer = NOBODY, decode: Decoder | None = None, ranks: Ranks = ALONE.ranks,
) -> list[Completion]:  # fmt: skip
    """The likeliest token each time: one answer to each prompt, of any number of them.

    answers: of a rollout. No call is larger than the rollout's own: as many rows are in flight, and
    no more prompts are read at once, so that it holds no more memory.
    """
    rows = rollout.in_flight(answers)
    at_once = -(-rows // rollout.num_generations) * rollout.max_prompt_length
    settings = Settings(
        max_new_tokens=rollout.max_completion_length, max_prompt=rollout.max_prompt_length,
        rows=max(min(rows, len(prompts)), 1), prefill_tokens=min(PREFILL_TOKENS, at_once),
        temperature=0.0,
        stop_tokens=() if end is None else (end,), reach=rollout.reach,
        repetition_penalty=rollout.repetition_penalty, stop_words=rollout.stop_words,
    )  # fmt: skip
    return _generate(built, prompts, settings, observer, read_token, decode, ranks)


def _generate(
    built: Built, prompts: Sequence[Ids], settings: Settings, observer: Observer, read: Read,
    decode: Decoder | None, ranks: Ranks,
) -> list[Completion]:  # fmt: skip
    """Weights that ranks share are gathered in each call of the model, and let go at the end."""
    recipe = built.recipe
    if recipe.parallel.world == 1:
        with autocast(built):
            return generate_batch(
                built.model, prompts, settings, observer=observer, read=read, decode=decode
            )
    together: Together = ranks.any if recipe.parallel.shards > 1 else bool
    dtype: torch.dtype = getattr(torch, recipe.compute_dtype)
    found = generate_batch(
        built.model, prompts, settings, observer=observer, read=read, decode=decode, dtype=dtype,
        together=together,
    )  # fmt: skip
    let_go(base_model(built.model))
    return found


def _come_in_groups(prompts: Sequence[Ids], group: int) -> bool:
    alike = all(prompt == prompts[at - at % group] for at, prompt in enumerate(prompts))
    return len(prompts) % group == 0 and alike
