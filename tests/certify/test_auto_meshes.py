"""A mesh that is left open is never one that the trainer refuses for the technique asked for."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_cells import SIZES
from msgspec.structs import replace
from tiny_steps import make_recipe

from memfit import api
from memfit.certify.tracing.world import fake_world
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.parallelism.limits import check_ranks
from memfit.plan.request.meshes import list_dealt
from memfit.records import from_data
from memfit.records.recipe import Parallel, Recipe
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
FAMILIES = ("mixtral", "llama")
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
    there = {"efficient": "math", "cudnn": "flash"}
    attention = there.get(recipe.attention, recipe.attention)
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


def test_experts_are_dealt_where_that_is_faster_and_fits() -> None:
    """A mixture's on one machine; seconds are well below those of a mesh that gathers them all."""
    changes = {"hardware.count": 8, "method": "full", "task.sequence_length": 2048}
    free = api.read("mixtral-8x7b", device="h100-sxm", changes=changes)
    chosen = api.plan(free, levers=False)
    assert chosen.recipe.parallel.ep > 1
    assert any("an even routing" in line for line in chosen.assumptions)
    stated = api.read(
        "mixtral-8x7b", device="h100-sxm", changes={**changes, "parallel.dp_shard": 8}
    )
    plain = api.plan(stated, levers=False)
    assert chosen.time.step_seconds < 0.9 * plain.time.step_seconds
    assert not any("an even routing" in line for line in plain.assumptions)


def test_only_the_experts_of_a_mixture_are_dealt_and_evenly() -> None:
    request = api.read("mixtral-8x7b", device="h100-sxm", changes={"hardware.count": 6})
    sparse, dense = (read_model(make_recipe(name).model).architecture for name in FAMILIES)
    assert list_dealt(request, dense) == ()
    assert list_dealt(request, sparse) == ()  # of 4 experts, which 6 ranks do not divide
    four = replace(request, hardware=replace(request.hardware, count=4, nodes=2))
    found = [(p.dp_replicate, p.dp_shard, p.ep) for p in list_dealt(four, sparse)]
    assert found == [(2, 4, 2), (2, 4, 4)]
    stated = replace(four, parallel=Parallel(dp_shard=8))
    assert list_dealt(stated, sparse) == ()
