"""All reward functions of a run over one batch of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import RewardSettings
from memfit.train.rl.advantages import sum_rewards
from memfit.train.rl.rewards.process import Judged, RewardProcess, check_readable, take_finite


class Judge(Protocol):
    """One reward function, ready to judge. A context manager."""

    def __enter__(self) -> Judge: ...

    def __exit__(self, *_: object) -> None: ...

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
    ) -> Judged:
        """Its rewards of a batch of answers."""


class Start(Protocol):
    """Makes a judge."""

    def __call__(self, spec: str, *, seconds: float, memory: int) -> Judge:
        """Of a name of `reward.funcs`; seconds of one call, bytes of its process."""


class Verdict(NamedTuple):
    """Rewards of a batch; NaN where there is none."""

    rewards: Tensor  # (answers,) fp32, weighed and summed
    by_function: Tensor  # (answers, functions) fp32
    failures: Counter[str]  # answers that a function gave no reward for its own failure, by kind


def check_named(settings: RewardSettings) -> None:
    """Raise InvalidRequest where nobody judges."""
    if not settings.funcs:
        raise InvalidRequest(
            "`reward.funcs` is empty: nobody judges the answers",
            hint="use `reward.funcs: [number]`, or `FILE.py:NAME`",
        )


def check_rewards(settings: RewardSettings) -> None:
    """Raise InvalidRequest where nobody judges, or a named file is not there."""
    check_named(settings)
    for spec in settings.functions:
        check_readable(spec)


class Judges:
    """The functions of `reward.funcs`, each in its own process; an adapter's scores come with
    a call of `judge`. A context manager.

    start: what judges in place of such a process.
    Raises InvalidRequest: no function, or one that cannot be loaded.
    """

    def __init__(self, settings: RewardSettings, start: Start = RewardProcess) -> None:
        check_named(settings)
        self._weights = settings.shares
        memory = units.parse_bytes(settings.memory)
        self._stack = ExitStack()
        self._judges = [
            self._stack.enter_context(start(spec, seconds=settings.timeout, memory=memory))
            if spec in settings.functions
            else None
            for spec in settings.funcs
        ]

    def ready(self) -> None:
        """Start all processes, so that a function that cannot be loaded is known at once."""
        for judge in self._judges:
            if isinstance(judge, RewardProcess):
                judge.ready()

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
        scores: Sequence[float] = (),
    ) -> Verdict:
        """What all functions together say of a batch; scores: of a reward model's adapter."""
        failures: Counter[str] = Counter()
        rows = []
        for judge in self._judges:
            if judge is None:
                found = take_finite(scores)
            else:
                found = judge.judge(prompts, completions, completion_ids, columns)
            failures += found.failures
            rows.append([torch.nan if r is None else r for r in found.rewards])
        by_function = torch.tensor(rows, dtype=torch.float32).T
        return Verdict(sum_rewards(by_function, torch.tensor(self._weights)), by_function, failures)
