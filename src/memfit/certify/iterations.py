"""Iterations of reinforcement learning on fake tensors: the trainer's own, within its bounds.

Lengths that a run finds out are set here: every prompt and answer as long as it may be, all slots
in use. Then an iteration of short answers that end one after the other, and another long one: what
the allocator holds by then is what a run meets whose answers grow. Of answers beyond
`WAVES` times the slots, and of micro-batches beyond the second, all are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from memfit.certify.tracing.fake_device import device_type
from memfit.certify.tracing.fast_fake import FastFakeMode
from memfit.certify.tracing.recorder import Recorder, Trace
from memfit.certify.tracing.trace_step import (
    TRACED_MICRO_BATCHES,
    bounds_of_weights,
    load,
    save,
    step_bounds,
    traced,
    weights_of,
    worst_shapes,
)
from memfit.records.hardware import Device
from memfit.records.ledger import ROLLOUT, Phase
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import Online, RewardSettings, Rollout
from memfit.train.generation.sampling import NewTokens
from memfit.train.generation.settings import Completion
from memfit.train.measure.observer import Observer
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, cut_all, iterate
from memfit.train.rl.rewards.process import Judged
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.rl.rows import Ids
from memfit.train.rl.sampling import Sample, sample_in_slots
from memfit.train.step.build import Built

WAVES = 2  # of answers: at the second, slots are filled anew
ENDS = 4  # lengths of the short answers: an eighth, a quarter, ... of the longest
ANY_REWARD = RewardSettings(funcs=("number",))  # where a plan names no function
_READ = torch.ops.aten._local_scalar_dense.default
_MAKE = torch.ops.aten.lift_fresh.default


def trace_iterations(recipe: Recipe, device: Device, *, workspaces: bool = True) -> Trace:
    """A run's instants in this process: load, three iterations, a checkpoint.

    The first iteration makes the optimizer's state; its update is `first_step`.
    Raises InvalidRequest and NotCertified as `trace_step` does.
    """
    kind = device_type(device)
    recorder = Recorder(kind, device if workspaces and kind == "cuda" else None)
    weights = weights_of(recipe)
    with traced(recipe, device, recorder) as mode:
        mode.rules |= {_READ: _read_number, _MAKE: _make}
        built = load(recipe, kind, recorder, weights)
        for index, long in enumerate((True, False, True)):
            observer = recorder if index else First(recorder)
            learning = make_learning(recipe, recorder, long=long)
            iterate(built, learning, index, observer=observer, cut=cut_few)
        save(built, kind, recorder)
    shapes = worst_shapes(recipe)
    bounds = step_bounds(recipe, shapes, shapes, kind, workspaces)
    rollout = describe_bounds(recipe)
    return recorder.trace((*rollout, *bounds, *bounds_of_weights(recipe, kind, weights)))


def describe_bounds(recipe: Recipe) -> tuple[str, ...]:
    """What answers may be for the certificate to hold."""
    rollout, answers = recipe.rollout, recipe.global_batch
    rows = min(rollout.rows or answers, answers)
    bounds = [
        f"prompts of at most {rollout.max_prompt_length} tokens, answers of at most"
        f" {rollout.max_completion_length}; {rows} of {answers} answers in flight"
    ]
    if answers > WAVES * rows:
        bounds.append(f"{WAVES} waves of answers traced: later ones are alike")
    return tuple(bounds)


def make_learning(recipe: Recipe, observer: Observer, *, long: bool) -> Learning:
    """The trainer's own, over prompts as long as they may be, or half as long."""
    rollout = recipe.rollout
    tokens = rollout.max_prompt_length if long else -(-rollout.max_prompt_length // 2)
    groups = recipe.global_batch // rollout.num_generations
    prompts = [Prompt([0] * tokens, {"prompt": ""})] * groups
    limits = () if long else short_limits(recipe.global_batch, rollout.max_completion_length)
    judges = Judges(recipe.reward if recipe.reward.funcs else ANY_REWARD, start=Constant)
    sampling = Sampling(
        rollout, prompts, groups, judges, lambda ids: "", make_sample(observer, limits), None,
        recipe.seed,
    )  # fmt: skip
    return Learning(cast(Online, recipe.objective), recipe.policy, sampling)


def short_limits(answers: int, most: int) -> tuple[int, ...]:
    """Of each answer: an eighth to a half of the longest, neighbours differing."""
    return tuple(-(-most * (1 + i % ENDS) // (2 * ENDS)) for i in range(answers))


def make_sample(observer: Observer, limits: tuple[int, ...]) -> Sample:
    """`sample_in_slots` of as many answers as differ in what they hold."""

    def sample(
        built: Built, prompts: Sequence[Ids], rollout: Rollout, end: int | None, seed: int
    ) -> list[Completion]:
        group, answers = rollout.num_generations, len(prompts)
        shown = min(-(-WAVES * (rollout.rows or answers) // group) * group, answers)
        made = sample_in_slots(
            built, prompts[:shown], rollout, end, seed,
            limits=limits[:shown], observer=observer, read=go_on,
        )  # fmt: skip
        return (made * -(-answers // shown))[:answers]

    return sample


def go_on(tokens: Tensor, chosen: Tensor, most: int) -> list[NewTokens]:
    """Every row goes on until a step's shapes change: see `sampling.Read`."""
    del chosen
    return [([0] * most, [0.0] * most) for _ in range(len(tokens))]


def cut_few(rows: int, each: int) -> Sequence[slice]:
    """The first micro-batches: later ones hold the same."""
    return cut_all(rows, each)[:TRACED_MICRO_BATCHES]


def _read_number(_: Any, tensor: Tensor) -> bool | int | float:
    """What a trace takes a number to be that the trainer reads; it sizes nothing."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 0


def _make(mode: FastFakeMode, tensor: Tensor) -> Tensor:
    """`torch.tensor` of numbers, which a trace need not remember: it remembers results instead."""
    made: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, tensor)
    return made


class Staying(Observer, Protocol):
    """A recorder."""

    def stay(self, phase: Phase) -> None:
        """Label what an instant of one phase made."""


class First:
    """The first iteration's observer: its update is one phase as a whole."""

    def __init__(self, recorder: Staying) -> None:
        self._recorder = recorder
        self.register_batch = recorder.register_batch
        self.register_cache = recorder.register_cache

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the rollout, or the update."""
        if phase in ROLLOUT:
            self._recorder.enter(phase)
        elif phase is Phase.FORWARD:
            self._recorder.enter(Phase.FIRST_STEP)
        else:
            self._recorder.stay(phase)


class Constant:
    """A judge to whom all answers are alike."""

    def __init__(self, spec: str, *, seconds: float, memory: int) -> None:
        del spec, seconds, memory

    def __enter__(self) -> Constant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
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
