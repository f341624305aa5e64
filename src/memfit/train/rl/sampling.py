"""Answers sampled from the model that is trained, adapters on.

`sample_plainly` runs each row from its first token anew for every new one: right for each family,
without a cache, and slow for long answers. Whatever else samples has its signature (`Sample`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from memfit.records.reinforcement import Rollout
from memfit.train.rl.rows import Ids
from memfit.train.step.build import Built
from memfit.train.step.step import Batch, next_logits


class Completion(NamedTuple):
    """One sampled answer."""

    ids: tuple[int, ...]  # the end token included where there is one
    log_probs: tuple[float, ...]  # of each token, at the temperature
    ended: Literal["stop", "length"]  # by the end token, or at its limit


class Sample(Protocol):
    """Samples one answer to each prompt; equal arguments and weights give equal answers."""

    def __call__(
        self, built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int
    ) -> list[Completion]:
        """end: the token that ends an answer; None: only its limit does."""


def sample_plainly(
    built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int
) -> list[Completion]:
    """See `Sample`. All rows advance together; one that has ended leaves."""
    was_training = built.model.training
    built.model.eval()
    try:
        return _sample(built, prompts, rollout, end, torch.Generator().manual_seed(seed))
    finally:
        built.model.train(was_training)


def _sample(
    built: Built,
    prompts: Sequence[Ids],
    rollout: Rollout,
    end: int | None,
    chance: torch.Generator,
) -> list[Completion]:
    rows = [list(prompt) for prompt in prompts]
    log_probs: list[list[float]] = [[] for _ in rows]
    ended: dict[int, Literal["stop", "length"]] = {}
    for step in range(rollout.max_completion_length):
        alive = [i for i in range(len(rows)) if i not in ended]
        if not alive:
            break
        chances = _next(built, [rows[i] for i in alive], rollout.temperature)
        drawn = torch.multinomial(chances.exp(), 1, generator=chance).squeeze(1)
        last = step + 1 == rollout.max_completion_length
        for index, token, log_p in zip(alive, drawn.tolist(), chances, strict=True):
            rows[index].append(token)
            log_probs[index].append(float(log_p[token]))
            if token == end:
                ended[index] = "stop"
            elif last:
                ended[index] = "length"
    return [
        Completion(tuple(row[len(prompt) :]), tuple(log_probs[i]), ended[i])
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]


def _next(built: Built, rows: Sequence[Ids], temperature: float) -> Tensor:
    """(rows, vocab) log-probabilities of what comes next, on the host."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(list(row))
    places = torch.tensor([len(row) - 1 for row in rows], device=built.device)
    ids = ids.to(built.device)
    logits = next_logits(built, Batch(ids, ids), places)
    return torch.log_softmax(logits / temperature, dim=-1).cpu()
