"""Answers scored by a reward model's adapter and head on the base that policy and value have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memfit.records.ledger import Phase
from memfit.records.reinforcement import Rollout
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.rl.rows import Cut, Ids, cut_all, lay_out_scored
from memfit.train.step.build import Built
from memfit.train.step.step import Batch, answer_scores


class AdapterScores(NamedTuple):
    """Scores answers in the update's micro-batches, of which one is on the device at a time."""

    built: Built
    rollout: Rollout
    observer: Observer = NOBODY
    cut: Cut = cut_all

    def __call__(self, prompts: Sequence[Ids], completions: Sequence[Ids]) -> list[float]:
        """What the head makes of each row's last token; rows are as wide as an update's."""
        self.observer.enter(Phase.REWARD)
        rows = list(zip(prompts, completions, strict=True))
        width = self.rollout.pad(max(len(prompt) + len(answer) for prompt, answer in rows))
        found = torch.zeros(len(rows))
        self.observer.register_batch(found)
        for at in self.cut(len(rows), self.built.recipe.micro_batch):
            found[at] = self._score(prompts[at], completions[at], width)
        scores: list[float] = found.tolist()
        return scores

    def _score(self, prompts: Sequence[Ids], completions: Sequence[Ids], width: int) -> Tensor:
        made, device = lay_out_scored(prompts, completions, width), self.built.device
        batch = Batch(made.input_ids.to(device), made.labels.to(device))
        self.observer.register_batch(batch.input_ids, batch.labels)
        return answer_scores(self.built, batch).cpu()


def scores_of(
    built: Built, rollout: Rollout, observer: Observer = NOBODY, cut: Cut = cut_all
) -> AdapterScores | None:
    """None where no adapter judges."""
    if not built.recipe.scored_by_adapter:
        return None
    return AdapterScores(built, rollout, observer, cut)
