"""What a certificate says that it holds for: each sentence where its cause is, and nowhere else."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_steps import make_recipe

from memfit.certify import BatchShape
from memfit.certify.tracing.trace_step import step_bounds
from memfit.optimizers import find_optimizer
from memfit.records.recipe import Parallel

SHAPE = BatchShape(rows=2, tokens=16)
# the sentence, on which devices, and the smallest change that brings it
CAUSES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "2 of 6 micro-batches traced": (("cpu", "cuda"), {"accumulation": 6}),
    "gloo's own copies": (("cpu",), {"parallel": Parallel(dp_shard=2)}),
    "what ranks that share products exchange": (("cuda",), {"parallel": Parallel(tp=2)}),
    "what stages exchange": (("cuda",), {"parallel": Parallel(pp=2)}),
    "is assumed to keep what it computes": (("cuda",), {"name": "adamw8bit"}),
    "allocates inside its update is not counted": (("cpu",), {"name": "adamw8bit"}),
    "pinned copies of the trained weights": (("cpu", "cuda"), {"offload": "optimizer"}),
    "cuDNN decides its attention's workspace": (("cpu", "cuda"), {"attention": "cudnn"}),
}


def say(kind: str, changes: dict[str, Any], *, workspaces: bool = False) -> tuple[str, ...]:
    recipe = make_recipe(**changes)
    return step_bounds(recipe, (SHAPE,), (SHAPE, SHAPE), kind, workspaces)


def find_said(kind: str, changes: dict[str, Any]) -> set[str]:
    texts = say(kind, changes)
    return {name for name in CAUSES if any(name in text for text in texts)}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_plain_step_says_nothing_of_what_it_has_not(kind: str) -> None:
    assert find_said(kind, {}) == set()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_brings_its_sentence_on_its_devices(name: str, kind: str) -> None:
    devices, changes = CAUSES[name]
    found = find_said(kind, changes)
    assert (name in found) == (kind in devices)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_two_causes_bring_what_each_of_them_brings(kind: str) -> None:
    for (_, one), (_, two) in combinations(CAUSES.values(), 2):
        if one.keys() & two.keys():
            continue
        assert find_said(kind, one | two) == find_said(kind, one) | find_said(kind, two)


@pytest.mark.parametrize(("kind", "workspaces", "said"), [
    ("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0), ("cpu", False, 0)
])  # fmt: skip
def test_workspaces_of_kernels_are_spoken_of_where_they_are_counted(
    kind: str, workspaces: bool, said: int
) -> None:
    texts = say(kind, {}, workspaces=workspaces)
    assert sum("memory inside CUDA kernels" in text for text in texts) == said


def test_the_data_are_spoken_of_where_no_batch_was_given() -> None:
    recipe = make_recipe()
    alone = step_bounds(recipe, None, (SHAPE,), "cpu", False)
    assert len(alone) == len(step_bounds(recipe, (SHAPE,), (SHAPE,), "cpu", False)) + 1
    assert str(recipe.sequence_length) in alone[0]


def test_the_optimizer_adds_its_own() -> None:
    recipe = make_recipe()
    for name in ("adamw", "adamw8bit-bnb", "adamw8bit-paged"):
        other = replace(recipe, optimizer=replace(recipe.optimizer, name=name))
        own = find_optimizer(other.optimizer).bounds
        assert set(own) <= set(step_bounds(other, (SHAPE,), (SHAPE,), "cuda", False))
