"""A mesh that is left open is never one that the trainer refuses for the technique asked for."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_cells import SIZES
from msgspec.structs import replace

from memfit import api
from memfit.certify.tracing.world import fake_world
from memfit.core.errors import InvalidRequest
from memfit.parallelism.limits import check_ranks
from memfit.records import from_data
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.train.step.build import build_model, build_optimizer

TECHNIQUES: dict[str, dict[str, Any]] = {
    "full": {}, "LoRA": {"method": "lora"}, "DoRA": {"method": "dora", "precision": "fp32"},
    "nf4": {"method": "lora", "base_format": "nf4"},
    "int8": {"method": "lora", "base_format": "int8"},
    **{name: {"task": {"objective": name}} for name in ("dpo", "simpo", "orpo", "kto", "reward")},
    "reward, LoRA": {"method": "lora", "task": {"objective": "reward"}},
    "grpo": {
        "task": {"objective": "grpo"}, "reward": {"funcs": ["number"]},
        "rollout": {"num_generations": 4, "max_prompt_length": 64, "max_completion_length": 64},
    },
    **{name: {"optimizer": {"name": name}} for name in ("adamw8bit", "muon", "lion", "adafactor")},
    "qat": {"qat": "int8"}, "fp8": {"precision": "fp8-mixed"},
    "compiled": {"compile": "blocks", "task": {"packing": False}},
}  # fmt: skip
NOWHERE = ("adafactor", "fp8")  # no mesh has them (test_mesh_cells.py), so that a plan says so
FEW = {"dpo": 2, "simpo": 2, "orpo": 2, "kto": 2, "reward": 2, "reward, LoRA": 2, "grpo": 4}


def ask(technique: str, count: int, rows: int) -> Request:
    changes = TECHNIQUES[technique]
    task = {"steps": 3, "sequence_length": 128, "global_batch": rows, **changes.get("task", {})}
    hardware = {"device": "h100-sxm", "count": count}
    words = {"model": SIZES, "weights": "random", "hardware": hardware, **changes, "task": task}
    return from_data(words, Request, source="test")


def on_cpu(recipe: Recipe) -> Recipe:
    """The same with kernels that this machine has: what of a mesh is refused does not depend on
    them, and `check_ranks` has seen those that were planned."""
    optimizer = recipe.optimizer
    if optimizer.name == "adamw8bit":
        optimizer = replace(optimizer, implementation="loop")
    attention = "math" if recipe.attention == "efficient" else recipe.attention
    return replace(recipe, attention=attention, optimizer=optimizer)


def accept(request: Request) -> bool:
    """Whether the request is planned, and then what is planned is built as a rank builds it."""
    try:
        recipe = api.plan(request, levers=False).recipe
    except InvalidRequest:
        return False
    check_ranks(recipe)
    recipe = on_cpu(recipe)
    with fake_world(recipe.parallel, 0, "cpu", lambda _: None, lambda *_: None):
        model = build_model(recipe, "cpu")
        build_optimizer(recipe, model)
    assert recipe.parallel.world == request.devices
    return True


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_an_open_mesh_is_one_that_the_trainer_builds(technique: str) -> None:
    """With rows for every rank, and with so few that ranks have to share something else."""
    assert accept(ask(technique, 2, 16)) == (technique not in NOWHERE)
    accept(ask(technique, 2, FEW.get(technique, 1)))


@pytest.mark.wide
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_an_open_mesh_of_more_ranks_is_one_that_the_trainer_builds(
    technique: str, count: int
) -> None:
    for rows in (64, FEW.get(technique, 1)):
        accept(ask(technique, count, rows))
