"""Iterations of reinforcement learning on fake tensors: the trainer's own, within its bounds.

Lengths that a run finds out are set here: every prompt and answer as long as it may be, all slots
in use. Then an iteration of short answers that end one after the other, and another long one: what
the allocator holds by then is what a run meets whose answers grow. Of answers beyond
`WAVES` times the slots, and of micro-batches beyond the second, all are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

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
    watch_activations,
    weights_of,
    worst_shapes,
)
from memfit.records.hardware import Device
from memfit.records.ledger import ROLLOUT, Phase
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import WAVES
from memfit.train.measure.observer import Observer
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rehearsal import make_learning
from memfit.train.rl.rows import cut_all

SHOWN_UPDATES = 2  # of those with one rollout: the first and the last
ENDS = 4  # lengths of the short answers: an eighth, a quarter, ... of the longest
_READ = torch.ops.aten._local_scalar_dense.default
_MAKE = torch.ops.aten.lift_fresh.default


def trace_iterations(
    recipe: Recipe,
    device: Device,
    *,
    workspaces: bool = True,
    rank: int = 0,
    all_updates: bool = False,
) -> Trace:
    """A run's instants in this process: load, three iterations, a checkpoint.

    The first iteration makes the optimizer's state; its update is `first_step`. Of several updates
    with one rollout the first and the last are traced, unless `all_updates`: those between hold
    what the last one holds, beside fewer results of others.
    Raises InvalidRequest and NotCertified as `trace_step` does.
    """
    kind = device_type(device)
    recorder = Recorder(kind, device if workspaces and kind == "cuda" else None)
    weights = weights_of(recipe)
    with traced(recipe, device, recorder, rank) as mode:
        mode.rules |= {_READ: _read_number, _MAKE: _make}
        built = load(recipe, kind, recorder, weights)
        for index, long in enumerate((True, False, True)):
            observer = recorder if index else First(recorder)
            learning = bound_learning(recipe, recorder, long=long, rank=rank)
            with watch_activations(recipe, recorder) if not index else nullcontext():
                iterate(
                    built, learning, index,
                    observer=observer, cut=cut_few, all_updates=all_updates,
                )  # fmt: skip
        save(built, kind, recorder, rank)
    shapes = worst_shapes(recipe)
    bounds = step_bounds(recipe, shapes, shapes, kind, workspaces)
    rollout = describe_bounds(recipe)
    return recorder.trace((*rollout, *bounds, *bounds_of_weights(recipe, kind, weights)))


def describe_bounds(recipe: Recipe) -> tuple[str, ...]:
    """What answers may be for the certificate to hold."""
    rollout, answers = recipe.rollout, recipe.own_rows
    rows = rollout.in_flight(answers)
    each = "" if recipe.parallel.dp == 1 else " on each rank"
    bounds = [
        f"prompts of at most {rollout.max_prompt_length} tokens, answers of at most"
        f" {rollout.max_completion_length}; {rows} of {answers} answers in flight{each}"
    ]
    if (times := recipe.policy.num_iterations) > SHOWN_UPDATES:
        bounds.append(f"{SHOWN_UPDATES} of {times} updates with a rollout traced: others are alike")
    if answers > WAVES * rows:
        bounds.append(f"{WAVES} waves of answers traced: later ones are alike")
    return tuple(bounds)


def bound_learning(recipe: Recipe, observer: Observer, *, long: bool, rank: int = 0) -> Learning:
    """The trainer's own, over prompts as long as they may be, or half as long."""
    rollout = recipe.rollout
    if long:
        return make_learning(recipe, observer, rollout.max_prompt_length, rank=rank)
    limits = short_limits(recipe.own_rows, rollout.max_completion_length)
    return make_learning(recipe, observer, -(-rollout.max_prompt_length // 2), limits, rank)


def short_limits(answers: int, most: int) -> tuple[int, ...]:
    """Of each answer: an eighth to a half of the longest, neighbours differing."""
    return tuple(-(-most * (1 + i % ENDS) // (2 * ENDS)) for i in range(answers))


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
