"""Iterations before the first one: prompts and answers as long as they may be, all slots in use.

Where memory runs out at all, it does here, before a run has learned anything. Nobody needs to know
what is sampled: decoding goes from one shape of its steps to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from memfit.records.ledger import ROLLOUT, Phase
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import RewardSettings, Rollout, find_online
from memfit.train.distributed.ranks import Alike, Ranks
from memfit.train.generation.sampling import NewTokens
from memfit.train.generation.settings import Completion
from memfit.train.measure.observer import Observer
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rewards.process import Judged
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.rl.rows import Ids, cut_all
from memfit.train.rl.sampling import ALONE, Share, sample_in_slots
from memfit.train.step.build import Built

TIMES = 2  # the first iteration makes the optimizer's states
ANY_REWARD = RewardSettings(funcs=("number",))  # where a plan names no function
MICRO_BATCHES = 2  # the second holds what the first one left; later ones are alike


def rehearse(built: Built, observer: Observer) -> None:
    """Run iterations that hold as much as any of the run's."""
    recipe = built.recipe
    tokens = recipe.rollout.max_prompt_length
    rank = dist.get_rank() if recipe.parallel.world > 1 else 0
    for index in range(TIMES):
        watching = observer if index else _First(observer)
        learning = make_learning(recipe, watching, tokens, rank=rank)
        iterate(built, learning, index, observer=watching, cut=cut_few)


def cut_few(rows: int, each: int) -> Sequence[slice]:
    """The first micro-batches."""
    return cut_all(rows, each)[:MICRO_BATCHES]


def make_learning(
    recipe: Recipe, observer: Observer, tokens: int, limits: tuple[int, ...] = (), rank: int = 0
) -> Learning:
    """A run's own, over prompts of `tokens` tokens, whose answers all have the same reward.

    limits: tokens of each of a rank's answers; empty: each is as long as it may be. All ranks do
    the same, so that none needs to hear of another.
    """
    rollout = recipe.rollout
    groups = recipe.global_batch // rollout.num_generations
    prompts = [Prompt([0] * tokens, {"prompt": ""})] * groups
    judges = Judges(recipe.reward if recipe.reward.funcs else ANY_REWARD, start=Constant)
    sampling = Sampling(
        rollout, prompts, groups, judges, lambda _: "",
        partial(_sample_few, observer=observer, limits=limits), None, recipe.seed,
        recipe.reward.missing_eos_penalty, ranks=alike(recipe, rank),
    )  # fmt: skip
    return Learning(find_online(recipe.objective), recipe.policy, sampling, recipe.value)


def alike(recipe: Recipe, rank: int) -> Ranks:
    """The ranks of a recipe, of which this is one."""
    return Alike(rank, recipe.parallel.world) if recipe.parallel.world > 1 else Ranks()


def _sample_few(
    built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int,
    *, observer: Observer, limits: tuple[int, ...], share: Share = ALONE,
) -> list[Completion]:  # fmt: skip
    """`sample_in_slots` of two waves of answers, which stand for all."""
    answers = len(prompts)
    shown = rollout.count_shown(answers)
    made = sample_in_slots(
        built, prompts[:shown], rollout, end, seed,
        limits=limits[:shown], observer=observer, read=_go_on,
        decode=lambda _: "", share=share,
    )  # fmt: skip
    return (made * -(-answers // shown))[:answers]


def _go_on(tokens: Tensor, chosen: Tensor, most: int) -> list[NewTokens]:
    """Every row goes on until a step's shapes change: see `sampling.Read`."""
    del chosen
    return [([0] * most, [0.0] * most) for _ in range(len(tokens))]


class _First:
    """The first iteration's observer: its update is one phase as a whole."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.register_batch = observer.register_batch
        self.register_cache = observer.register_cache

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the rollout, or the update."""
        self._observer.enter(phase if phase in ROLLOUT else Phase.FIRST_STEP)


class Constant:
    """A judge to whom all answers are alike."""

    def __init__(self, spec: str, *, seconds: float, memory: int) -> None:
        del spec, seconds, memory

    def __enter__(self) -> Constant:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
    ) -> Judged:
        """1 each."""
        del completions, completion_ids, columns
        return Judged((1.0,) * len(prompts), Counter())
