"""One rollout: prompts, sampled answers, their rewards; a function of (weights, seed, iteration).

A run that is killed makes the same rollout once more from its checkpoint, bit for bit.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import Rollout
from memfit.train.distributed.ranks import Ranks
from memfit.train.generation.settings import Completion
from memfit.train.rl.advantages import find_even_groups
from memfit.train.rl.judging import Judges, Verdict
from memfit.train.rl.rows import Ids
from memfit.train.rl.sampling import Sample, Share
from memfit.train.step.build import Built

COLUMN_OF_PROMPTS = "prompt"
STOPPED = ("stop_token", "stop_word")  # why an answer ended that was not cut


class Score(Protocol):
    """What a reward model on the same base makes of answers."""

    def __call__(self, prompts: Sequence[Ids], completions: Sequence[Ids]) -> list[float]:
        """A score of each."""


class Prompt(NamedTuple):
    """One row of the data."""

    ids: Ids
    columns: Mapping[str, Any]  # all of the row's, `prompt` included: what rewards read


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a rollout is made with, beside the weights."""

    rollout: Rollout
    prompts: Sequence[Prompt]  # of the data, within `max_prompt_length`
    groups: int  # prompts of one rollout
    judges: Judges
    decode: Callable[[Ids], str]
    sample: Sample
    end: int | None  # the token that ends an answer
    seed: int
    missing_eos_penalty: float = 0.0  # is taken off the reward of an answer that reached its limit
    # rows of a rollout by iteration and attempt, where the data are several; None: `choose_prompts`
    choose: Callable[[int, int], list[int]] | None = None
    # those that sample and judge together: each answers its share of the prompts
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        """Raise InvalidRequest where the data has fewer prompts than a rollout takes."""
        if len(self.prompts) < self.groups:
            raise InvalidRequest(
                f"the data has {len(self.prompts)} prompts of at most"
                f" {self.rollout.max_prompt_length} tokens, and a rollout takes {self.groups}",
                hint="use a smaller `task.global_batch` or a longer `rollout.max_prompt_length`",
            )


class Experience(NamedTuple):
    """Answers with their rewards; those to one prompt are neighbours."""

    prompts: tuple[Prompt, ...]  # one an answer
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    rewards: Tensor  # (answers,) fp32, NaN where there is none
    sampled_reward: float  # their mean, with those of groups that were left out; NaN: none
    by_function: Tensor
    failures: Counter[str]
    even_groups: int  # that were sampled: their answers have all the same reward
    sampled_groups: int
    rollout_seconds: float
    reward_seconds: float
    sampled_tokens: int

    @property
    def truncated(self) -> Tensor:
        """(answers,) bool: those that reached their limit."""
        return find_truncated(self.completions)


def keep_short(prompts: Sequence[Prompt], rollout: Rollout) -> tuple[list[Prompt], int]:
    """Prompts within `max_prompt_length`, and how many are left out."""
    short = [p for p in prompts if 0 < len(p.ids) <= rollout.max_prompt_length]
    return short, len(prompts) - len(short)


def order_rows(count: int, seed: int, *facts: int) -> list[int]:
    """All rows of the data in an order drawn from a seed and what it is for."""
    return [int(row) for row in _random(seed, *facts).permutation(count)]


def choose_prompts(count: int, groups: int, seed: int, iteration: int, attempt: int) -> list[int]:
    """Rows of the data for a rollout: all once an epoch, in an order drawn from the seed.

    attempt: the round of dynamic sampling, which draws any rows; 0 is the rollout's own.
    """

    if attempt:
        return order_rows(count, seed, iteration, attempt)[:groups]
    places = range(iteration * groups, (iteration + 1) * groups)
    epochs = {
        epoch: order_rows(count, seed, epoch) for epoch in {place // count for place in places}
    }
    return [epochs[place // count][place % count] for place in places]


def roll_out(
    built: Built, sampling: Sampling, iteration: int, score: Score | None = None
) -> Experience:
    """Sample and judge; with `dynamic_sampling`, until enough groups tell answers apart.

    score: of a reward model's adapter, where one judges.
    """
    rollout, found = sampling.rollout, _Found()
    for attempt in range(rollout.dynamic_sampling + 1):
        if sampling.choose is not None:
            rows = sampling.choose(iteration, attempt)
        else:
            rows = choose_prompts(
                len(sampling.prompts), sampling.groups, sampling.seed, iteration, attempt
            )
        found.add(*_sample_and_judge(built, sampling, rows, (iteration, attempt), score), rollout)
        if found.uneven >= sampling.groups or not rollout.dynamic_sampling:
            break
    return found.take(sampling.groups, rollout.num_generations)


def _sample_and_judge(
    built: Built, sampling: Sampling, rows: Sequence[int], when: tuple[int, int],
    score: Score | None,
) -> tuple[list[Prompt], list[Completion], list[str], Verdict, float, float]:  # fmt: skip
    """Of all ranks, in the order of the prompts: each samples and judges its share of them."""
    rollout, ranks = sampling.rollout, sampling.ranks
    prompts = [sampling.prompts[row] for row in rows for _ in range(rollout.num_generations)]
    chance = int(_random(sampling.seed, *when, 1).integers(2**62))
    sample, own = sampling.sample, own_part(len(prompts), ranks)
    if ranks.size > 1:
        sample = partial(sample, share=Share(own.start, ranks))
    start = time.perf_counter()
    completions = sample(built, [p.ids for p in prompts[own]], rollout, sampling.end, chance)
    sampled = time.perf_counter()
    texts, verdict = judge_answers(sampling, prompts[own], completions, score)
    found = Answered(completions, texts, verdict, sampled - start, time.perf_counter() - sampled)
    return prompts, *join_shares(found, ranks)


class Answered(NamedTuple):
    """One rank's answers, what was made of them, and how long it took."""

    completions: list[Completion]
    texts: list[str]
    verdict: Verdict
    sampling: float = 0.0
    judging: float = 0.0


def own_part(count: int, ranks: Ranks) -> slice:
    """Which of `count` neighbours are this rank's."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def join_shares(own: Answered, ranks: Ranks) -> Answered:
    """The answers of all ranks in their order, on each of them; the seconds of the slowest.

    Their tokens and rewards, which are little beside what one step moves: whatever is worked out of
    them is then what one process would.
    """
    if ranks.size == 1:
        return own
    completions, texts, verdict, *seconds = own
    answers = [(c.ids, c.log_probs, c.ended) for c in completions]
    rewards = verdict.rewards.tolist(), verdict.by_function.tolist()
    shares = ranks.gather_texts(json.dumps([answers, texts, *rewards, verdict.failures, seconds]))
    made: list[Completion] = []
    of_all: list[str] = []
    sums: list[float] = []
    by_function: list[list[float]] = []
    failures: Counter[str] = Counter()
    slowest = [0.0, 0.0]
    for share in shares:
        theirs, words, reward, parts, failed, spent = json.loads(share)
        made += [Completion(tuple(ids), tuple(chances), ended) for ids, chances, ended in theirs]
        of_all += words
        sums += reward
        by_function += parts
        failures += Counter(failed)
        slowest = [max(pair) for pair in zip(slowest, spent, strict=True)]
    found = Verdict(
        torch.tensor(sums, dtype=torch.float32),
        torch.tensor(by_function, dtype=torch.float32).view(len(made), -1), failures,
    )  # fmt: skip
    return Answered(made, of_all, found, *slowest)


def judge_answers(
    sampling: Sampling, prompts: Sequence[Prompt], completions: Sequence[Completion],
    score: Score | None = None,
) -> tuple[list[str], Verdict]:  # fmt: skip
    """Texts of answers, one to each prompt, and their rewards."""
    if not prompts:  # of few held-out ones a rank may have none
        return [], Verdict(torch.empty(0), torch.empty(0, 0), Counter())
    rollout = sampling.rollout
    texts = [sampling.decode(_without_end(c.ids, sampling.end)) for c in completions]
    columns: dict[str, Any] = {"max_completion_length": rollout.max_completion_length}
    for name in prompts[0].columns:
        if name != COLUMN_OF_PROMPTS:
            columns[name] = [p.columns.get(name) for p in prompts]
    ids = [c.ids for c in completions]
    scores = [] if score is None else score([p.ids for p in prompts], ids)
    questions = [p.columns[COLUMN_OF_PROMPTS] for p in prompts]
    verdict = sampling.judges.judge(
        questions,
        [_answer(prompt, text) for prompt, text in zip(questions, texts, strict=True)],
        ids,
        columns,
        scores,
    )
    if sampling.missing_eos_penalty:
        off = sampling.missing_eos_penalty * find_truncated(completions).float()
        verdict = verdict._replace(rewards=verdict.rewards - off)
    return texts, verdict


def find_truncated(completions: Sequence[Completion]) -> Tensor:
    """(answers,) bool: those that reached their limit."""
    return torch.tensor([c.ended not in STOPPED for c in completions])


def _answer(prompt: Any, text: str) -> Any:
    """An answer as TRL's reward functions have it: to messages a message, to a text a text."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def _without_end(ids: Ids, end: int | None) -> Ids:
    return ids[:-1] if ids and ids[-1] == end else ids


def _random(*facts: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(facts))


class _Found:
    """Groups of all rounds of a rollout."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._completions: list[Completion] = []
        self._texts: list[str] = []
        self._rewards: list[Tensor] = []
        self._by_function: list[Tensor] = []
        self._even: list[bool] = []
        self._failures: Counter[str] = Counter()
        self._seconds = [0.0, 0.0]

    @property
    def uneven(self) -> int:
        """Groups whose answers have not all the same reward."""
        return len(self._even) - sum(self._even)

    def add(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        texts: list[str],
        verdict: Verdict,
        sampling: float,
        judging: float,
        rollout: Rollout,
    ) -> None:
        """The groups of one round."""
        self._prompts += prompts
        self._completions += completions
        self._texts += texts
        self._rewards.append(verdict.rewards)
        self._by_function.append(verdict.by_function)
        group = rollout.num_generations
        if group > 1:
            self._even += find_even_groups(verdict.rewards, group).tolist()
        else:  # nothing is compared within it
            self._even += [False] * len(prompts)
        self._failures += verdict.failures
        self._seconds = [self._seconds[0] + sampling, self._seconds[1] + judging]

    def take(self, groups: int, size: int) -> Experience:
        """As many groups as a rollout holds: those that tell answers apart first."""
        order = sorted(range(len(self._even)), key=lambda g: self._even[g])[:groups]
        rows = [g * size + i for g in sorted(order) for i in range(size)]
        return Experience(
            tuple(self._prompts[r] for r in rows),
            tuple(self._completions[r] for r in rows),
            tuple(self._texts[r] for r in rows),
            torch.cat(self._rewards)[rows],
            float(torch.cat(self._rewards).nanmean()),
            torch.cat(self._by_function)[rows],
            self._failures,
            sum(self._even),
            len(self._even),
            self._seconds[0],
            self._seconds[1],
            sum(len(c.ids) for c in self._completions),
        )
