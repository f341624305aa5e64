"""Evaluations of held-out rows: what a line of the log says of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from memfit.records.ledger import Phase
from memfit.train.data.sampler import Sampler
from memfit.train.habits.metrics import Metrics, Predicted
from memfit.train.habits.stopping import PREFIX
from memfit.train.measure.counters import count_beside, count_targets, to_batch
from memfit.train.model.qat import unrounded
from memfit.train.run.session import Session
from memfit.train.step.build import Built
from memfit.train.step.preference import Rewards, name_rewards
from memfit.train.step.rated import name_ratings
from memfit.train.step.step import evaluate


def evaluate_held_out(
    session: Session,
    built: Built,
    held_out: Sampler,
    tokens: int,
    metrics: Metrics | None = None,
) -> dict[str, float | bool]:
    """Mean loss over the first held-out tokens, the same each time; of pairs, rewards too.

    tokens: how many, 0 for all. metrics: functions whose figures are added. The standard error is
    of a mean over micro-batches that differ in their targets (Cochran, Sampling Techniques, 1977,
    eq. 6.4); unknown from a single one.
    """
    sums, counts, rewards = list[float](), list[int](), Rewards()
    beside = _tokens_a_pair(session, held_out, tokens)
    predicted = Predicted() if metrics else None
    session.meter.mark().enter(Phase.EVALUATE)
    for micro in held_out.all_once(tokens):
        mine = (0.0, 0.0)
        if micro.targets or session.ranks.size > 1:  # FSDP2's ranks run together
            batch = to_batch(micro, built.device, beside)
            if predicted is not None:
                batch = replace(batch, see=predicted.see)
            loss, targets = evaluate(built, batch, rewards)
            if predicted is not None:
                predicted.end_batch(micro.labels)
            mine = float(loss), float(targets)
        for its_loss, its_targets in session.gather(*mine):
            if its_targets:
                sums.append(its_loss)
                counts.append(int(its_targets))
    session.compare()
    count = sum(counts)
    mean = sum(sums) / count
    found: dict[str, float | bool] = {
        "evaluation_loss": mean,
        "evaluation_targets": count,
        "evaluation_whole": held_out.reads_all(tokens),
    }
    if (many := len(counts)) > 1:
        off = sum((total - mean * n) ** 2 for total, n in zip(sums, counts, strict=True))
        found["evaluation_error"] = math.sqrt(off * many / (many - 1)) / count
    if rewards.sums is not None:
        named = name_all_rewards(session, rewards.sums, count)
        found |= {f"evaluation_{name}": value for name, value in named.items()}
    if metrics and predicted is not None:
        figures = metrics.compute(predicted, session.ranks)
        found |= {f"{PREFIX}{name}": value for name, value in figures.items()}
    return found


def sample_answers(session: Session, built: Built, step: int) -> dict[str, Any]:
    """Answers to a few held-out prompts, at every `run.sample_every`th evaluation and the last."""
    number = step // session.every(session.cadence.evaluate_every)
    due = step == session.recipe.steps or number % session.cadence.sample_every == 0
    if session.samples is None or not due:
        return {}
    found = session.samples.answer(built, session.meter.marking())
    session.compare()
    return {"samples": found}


def name_all_rewards(session: Session, sums: torch.Tensor, count: int) -> dict[str, float]:
    """Of all ranks' sums, over what they have together; waits for the device."""
    gathered = [sum(each) for each in zip(*session.gather(*sums.tolist()), strict=True)]
    name = name_ratings if session.recipe.rates else name_rewards
    return name(gathered, count)


def _tokens_a_pair(session: Session, held_out: Sampler, tokens: int) -> float:
    """Tokens of a held-out cross-entropy over the pairs beside it: sums of both, divided by the
    pairs, are then the mean of either."""
    recipe = session.recipe
    if not recipe.learns:
        return 1.0
    micros = list(held_out.all_once(tokens))
    own = session.gather(count_targets(recipe, micros), count_beside(recipe, micros))
    return sum(beside for _, beside in own) / sum(pairs for pairs, _ in own)


def evaluate_rounding(session: Session, built: Built) -> dict[str, float]:
    """Of weights that will be rounded: held-out losses as they are, and rounded as they are."""
    if session.held_out is None or not session.recipe.qat:
        return {}
    # over the same rows as the last evaluation, which is what both are compared with
    tokens = session.cadence.evaluate_tokens
    with unrounded(built.model):
        plain = evaluate_held_out(session, built, session.held_out, tokens)["evaluation_loss"]
    rounded = evaluate_held_out(session, built, session.held_out, tokens)["evaluation_loss"]
    return {"loss_unrounded": plain, "loss_rounded": rounded}
