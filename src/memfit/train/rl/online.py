"""Iterations as steps of a run: from its recipe and data, to lines of its log."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memfit.adapters.shared.stored import CONFIG, WEIGHTS
from memfit.core.errors import RunFailed
from memfit.optimizers.shared.groups import set_rate
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import RewardSettings, find_online
from memfit.train.data.tokenizer import Tokenizer
from memfit.train.distributed.ranks import Ranks
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, Summary, iterate
from memfit.train.rl.prompts import PromptRows, choose_of_portions
from memfit.train.rl.rewards.adapter import scores_of
from memfit.train.rl.rollout import (
    Answered,
    Sampling,
    find_truncated,
    join_shares,
    judge_answers,
    own_part,
)
from memfit.train.rl.sampling import answer_greedily, sample_in_slots
from memfit.train.run.session import WATCHED_FIRST, Session
from memfit.train.step.build import Built
from memfit.train.step.schedule import learning_rate


@contextmanager
def learning_of(
    recipe: Recipe, rows: object, tokenizer: Tokenizer, ranks: Ranks | None = None
) -> Iterator[Learning | None]:
    """What a recipe's iterations are made with; None of one that samples nothing.

    Raises InvalidRequest: a reward function that cannot be loaded.
    """
    if not isinstance(rows, PromptRows):
        yield None
        return
    objective = find_online(recipe.objective)
    with Judges(recipe.reward) as judges:
        judges.ready()
        groups = recipe.global_batch // recipe.rollout.num_generations
        several = partial(choose_of_portions, rows.portions, groups, recipe.seed)
        sampling = Sampling(
            recipe.rollout, rows.prompts, groups,
            judges, tokenizer.decode, partial(sample_in_slots, decode=tokenizer.decode),
            tokenizer.end, recipe.seed, recipe.reward.missing_eos_penalty,
            choose=several if rows.portions else None, ranks=ranks or Ranks(),
        )  # fmt: skip
        yield Learning(objective, recipe.policy, sampling, recipe.value, rows.held_out)


def digest_rewards(settings: RewardSettings) -> str:
    """Of the content of the user's own reward functions and of an adapter; "" where none is."""
    paths = [Path(path) for path in settings.files]
    if folder := settings.adapter_folder:
        paths += [Path(folder) / name for name in (CONFIG, WEIGHTS)]
    if not paths:
        return ""
    facts = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return hashlib.sha256("".join(facts).encode()).hexdigest()[:32]


def take_iteration(
    session: Session, learning: Learning, built: Built, index: int
) -> dict[str, Any]:
    """Run iteration `index` and return its line of the log."""
    recipe, meter = session.recipe, session.meter
    rate = learning_rate(recipe.optimizer, index, recipe.steps)
    set_rate(built.optimizer, rate)
    watched = meter.device.type == "cpu" and (
        index < WATCHED_FIRST or index % session.cadence.watch_every == 0
    )
    start = time.perf_counter()
    if watched or session.watcher.wants_names:
        with meter.observing(built) as observer:
            summary = iterate(built, _watched(learning, observer), index, observer=observer)
    else:
        meter.failed = None
        observer = meter.marking()
        summary = iterate(built, _watched(learning, observer), index, observer=observer)
    session.done = index + 1
    _check_finite(summary, index + 1)
    seconds = time.perf_counter() - start
    session.compare()
    figures = {k: v if math.isfinite(v) else None for k, v in summary.figures.items()}
    ranks = {"ranks": session.ranks.size} if session.ranks.size > 1 or session.ranks.notes else {}
    return {
        "step": index + 1, "learning_rate": rate, **ranks, **figures,
        "rewards": list(summary.rewards_by_function), "reward_failures": summary.failures,
        "samples": list(summary.samples), "tokens": summary.update_tokens, "seconds": seconds,
        "tokens_per_second": summary.update_tokens / seconds,
        "memory_peak_allocated": meter.peak or None, "watched": watched,
    }  # fmt: skip


def evaluate_iteration(session: Session, learning: Learning, built: Built) -> dict[str, Any]:
    """Held-out prompts, answered by the weights as they are; what a line of the log says of them.

    It is counted as the phases of a rollout, whose calls are as large.
    """
    found = evaluate_prompts(built, learning, session.meter.marking())
    session.compare()
    return found


def evaluate_prompts(
    built: Built, learning: Learning, observer: Observer = NOBODY
) -> dict[str, float | None]:
    """Figures of a line of the log: the mean reward of answers to all held-out prompts.

    The standard error is of a mean over prompts, whose answers are no draws; None of fewer than two
    rewards. Nothing is drawn, so that the run goes on as it would have without.
    """
    sampling, start = learning.sampling, time.perf_counter()
    prompts, ranks = list(learning.held_out), sampling.ranks
    own = prompts[own_part(len(prompts), ranks)]
    completions = answer_greedily(
        built, [p.ids for p in own], sampling.rollout, built.recipe.own_rows, sampling.end,
        observer=observer, decode=sampling.decode, ranks=ranks,
    )  # fmt: skip
    judge = scores_of(built, sampling.rollout, observer)
    judged = Answered(completions, *judge_answers(sampling, own, completions, judge))
    completions, _, verdict, *_ = join_shares(judged, ranks)
    rewards = [r for r in verdict.rewards.tolist() if r == r]
    count = len(rewards)
    mean = sum(rewards) / count if count else None
    error = None
    if mean is not None and count > 1:
        error = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (count - 1) / count)
    return {
        "evaluation_reward": mean,
        "evaluation_reward_error": error,
        "evaluation_prompts": len(prompts),
        "evaluation_unjudged": 1 - count / len(prompts),
        "evaluation_length": sum(len(c.ids) for c in completions) / len(prompts),
        "evaluation_truncated": float(find_truncated(completions).float().mean()),
        "evaluation_seconds": time.perf_counter() - start,
    }


def _watched(learning: Learning, observer: Observer) -> Learning:
    sample = partial(sample_in_slots, decode=learning.sampling.decode, observer=observer)
    sampling = replace(learning.sampling, sample=sample)
    return replace(learning, sampling=sampling)


def _check_finite(summary: Summary, step: int) -> None:
    for name in ("loss", "grad_norm"):
        value = summary.figures.get(name, 0.0)
        if not math.isfinite(value):
            raise RunFailed(
                f"the {name.replace('_', ' ')} of step {step} is {value}",
                hint="lower `optimizer.learning_rate`, or use `precision: fp32`",
            )
