"""What a plan takes for granted: every knob that the request leaves open and that moves bytes,
seconds or what is learned, in short lines.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import NamedTuple

from memfit import catalog
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import exists
from memfit.objectives import find_objective
from memfit.optimizers import optimizers
from memfit.plan.request.data_size import DataSize, estimate_data
from memfit.plan.request.model_reference import expand
from memfit.plan.request.objectives.sampled import describe_sampled
from memfit.records.recipe import EP_IMBALANCE, Recipe
from memfit.records.request import LoraRequest, Request, Task

ASSUMED_STEPS = 1000  # where neither a length nor data is given
MOST_BETA2 = 0.995  # a change of 1 - beta2 is lost below half of bf16's last digit, 1/256
PURE = "no fp32 copy of weights or states"


class Steps(NamedTuple):
    """Optimizer steps of a run, and where they come from."""

    steps: int  # 0: not known
    assumed: str  # "" where the request states them


def count_steps(request: Request, length: int, packed: bool) -> Steps:
    """The steps that are requested, or those that epochs of the data are.

    length: tokens of a row; packed: whether rows are filled with whole documents.
    """
    task = request.task
    if task.steps is not None:
        return Steps(task.steps, "")
    if task.tokens is not None:
        return Steps(max(1, -(-task.tokens // (request.global_batch * length))), "")
    if not task.data:
        if task.epochs is None:
            return Steps(ASSUMED_STEPS, f"{ASSUMED_STEPS} steps (no length and no data given)")
        return Steps(0, f"steps unknown: {_show_passes(task.epochs)} of data whose size is not"
                     " known (`--set task.data=FILE` counts a file here)")  # fmt: skip
    found = estimate_data(task.data, request.tokenizer or _folder(request))
    if found is None or found.tokens < 1:
        absent = "=" not in task.data and not exists(expand(task.data))
        fault = "is not here" if absent else "holds nothing here whose tokens can be estimated"
        return Steps(0, f"steps unknown: `task.data: {task.data}` {fault}")
    epochs = 1.0 if task.epochs is None else task.epochs
    rows = _count_rows(task, found, length, request.generations, packed=packed)
    steps = max(1, math.ceil(rows * epochs / request.global_batch))
    about = f"about {steps:,} step{'s' if steps != 1 else ''}"
    return Steps(steps, f"{about}: {_show_passes(epochs)} of about"
                 f" {units.show_count(found.tokens)} tokens; {found.because}")  # fmt: skip


def describe_names(request: Request) -> tuple[str, ...]:
    """Which rows of the catalogue were taken for names that are not a row's own, and machines that
    are larger than the device's usual ones."""
    lines, model, name = [], request.model, request.hardware.device
    if isinstance(model, str) and not exists(expand(model)):
        with suppress(InvalidRequest):  # a hub id that is in no table
            lines.append(catalog.describe_model(model))
    if name not in ("auto", "cpu"):
        lines.append(catalog.describe_device(name))
        device = catalog.find_device(name)
        if device.memory is None and "/" in device.memory_datasheet and not request.limits.memory:
            lines.append(f"`{device.id}` is sold with {device.memory_datasheet}: the largest is"
                         " planned with (`--memory SIZE` says yours)")  # fmt: skip
        usual = re.findall(r"\d+", device.devices_per_node)
        count = request.hardware.count
        if usual and count > max(map(int, usual)):
            lines.append(f"{count} devices in one machine, as `hardware.count` says; machines with"
                        f" `{device.id}` have {max(usual, key=int)}:"
                        f" `--device {name}:{count}` lays them out")  # fmt: skip
    return tuple(line for line in lines if line)


def _show_passes(epochs: float) -> str:
    return "one epoch" if epochs == 1 else f"{epochs:g} epochs"


def is_estimated(task: Task) -> bool:
    """Whether the number of steps follows from the data, which only training counts exactly."""
    return task.steps is None and task.tokens is None and bool(task.data)


def _folder(request: Request) -> str:
    return request.model if isinstance(request.model, str) else ""


def _count_rows(task: Task, size: DataSize, length: int, answers: int, *, packed: bool) -> float:
    if packed:
        return size.tokens / length
    return size.records * (2 if find_objective(task.objective).pairs else 1) * answers


def _describe_score(recipe: Recipe) -> str:
    if not recipe.scores or recipe.weights == "random":
        return ""
    return "the score head starts from random numbers, unless the model's files have one"


def _describe_routing(request: Request, recipe: Recipe) -> str:
    own = recipe.parallel
    stated = request.parallel != "auto" and request.parallel.ep_imbalance != EP_IMBALANCE
    if own.ep == 1 or stated or not recipe.is_own:
        return ""
    return (
        f"no rank receives over {own.received:g}x the tokens of an even routing for its experts"
        " (`parallel.ep_imbalance`); seconds are of an even one"
    )


def describe_assumed(request: Request, recipe: Recipe) -> tuple[str, ...]:
    """Lines on what the request leaves at its default, but for rows' length and steps."""
    lines = [
        _describe_unused(request, recipe),
        _describe_batch(request, recipe),
        describe_sampled(request, recipe),
        _describe_score(recipe),
        _describe_routing(request, recipe),
        _describe_adapter(request, recipe),
    ]
    if recipe.is_own:  # others' plans name each default of their framework
        lines += [describe_storage(request, recipe), _describe_optimizer(request, recipe)]
    return tuple(line for line in lines if line)


def _describe_unused(request: Request, recipe: Recipe) -> str:
    if recipe.adapted or request.lora == LoraRequest():
        return ""
    return f"`lora` is not used, as `method: {recipe.method}` trains no adapters"


def _describe_batch(request: Request, recipe: Recipe) -> str:
    """Whose step, the global batch and packing."""
    parts = []
    if recipe.is_own:
        parts.append("memfit's own step (`framework` names another's)")
    if request.task.packing == "auto":
        packed = "filled with whole documents (packing)" if recipe.packing else "not packed"
        parts.append(f"rows {packed}")
    return ", ".join(parts)


def _describe_adapter(request: Request, recipe: Recipe) -> str:
    requested, plain, own = request.lora, LoraRequest(), recipe.lora
    if not recipe.adapted or (requested.targets != "auto" and requested.rank != plain.rank):
        return ""
    more = "; `lora.targets: all-linear` adapts all" if requested.targets == "auto" else ""
    return f"adapters of rank {own.rank}, alpha {own.alpha:g} on {', '.join(own.targets)}{more}"


def describe_storage(request: Request, recipe: Recipe) -> str:
    """How weights, gradients and states are stored, where that is left open or is pure bf16."""
    own, family = recipe.optimizer, optimizers.find(recipe.optimizer.name)
    if is_pure(recipe):
        fault = "updates below 1/256 of a weight are lost"
        if family.second_moments and not family.state_bits and own.beta2 > MOST_BETA2:
            fault = f"second moments stall at beta2 {own.beta2:g}, {fault}"
        if recipe.adapted:
            return f"adapters and their states in bf16, {PURE}: {fault}"
        return f"weights, gradients and {own.name}'s states in bf16, {PURE}: {fault}"
    if request.precision != "auto" and (not recipe.adapted or request.base_format != "auto"):
        return ""
    trained = "bf16" if recipe.trainable_dtype == "bfloat16" else "fp32"
    states_in = f"{family.state_bits} bits" if family.state_bits else trained
    rounded = ", updates rounded stochastically" if own.stochastic_rounding else ""
    products = f"; products in {recipe.compute_dtype}" if recipe.autocast else ""
    if recipe.adapted:
        base = f"frozen base in {recipe.base_format}, adapters and gradients"
        return f"{base} in {trained}{rounded}, optimizer states in {states_in}{products}"
    also = " and optimizer states" if states_in == trained else ""
    rest = "" if also else f", optimizer states in {states_in}"
    what = f"weights, gradients{also}" if also else "weights and gradients"
    return f"{what} stored in {trained}{rounded}{rest}{products}"


def is_pure(recipe: Recipe) -> bool:
    """Whether trained weights are bf16 without an fp32 copy and without rounding by chance."""
    return recipe.trainable_dtype == "bfloat16" and not recipe.optimizer.stochastic_rounding


def _describe_optimizer(request: Request, recipe: Recipe) -> str:
    requested, own = request.optimizer, recipe.optimizer
    name = own.name if requested.name == "auto" else ""
    rate = f"learning rate {own.learning_rate:g}" if requested.learning_rate == "auto" else ""
    return ", ".join(part for part in (name, rate) if part)
