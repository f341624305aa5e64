"""Every technique on every axis of a mesh: held to one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_cells import (
    AXES,
    CELLS,
    NOT_OURS,
    SAMPLED,
    TECHNIQUES,
    TRAINED,
    make_cell,
    make_sampled,
    name_cell,
    refusal,
)
from rank_runs import assert_as_certified, assert_as_one_process, run_asked

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Phase

RECIPES = {name_cell(*cell): make_cell(*cell) for cell in CELLS}
CPU = catalog.find_device("cpu-x86")
SCALARS = 16  # bytes of 0-dim results that a step's caller may still hold
HOLD_SCALARS = (Phase.FIRST_STEP, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP)
# a plan says what compiled blocks keep; their operators, one by one, hold more meanwhile
WITHIN_BLOCKS = (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE)
# cells whose parts no other test runs; the rest is of the wide suite
TOLD = (
    "DoRA on FSDP2", "AdamW in 8 bits on tp", "Lion on pp", "QAT on tp",
    "label smoothing, z-loss on tp", "LoRA over nf4 on pp", "compiled blocks on FSDP2",
    "SimPO on cp", "reward model on cp", "KTO on pp", "NEFTune on tp",
    "Muon on FSDP2", "KTO on ep",
)  # fmt: skip
NAMES = [n if n in TOLD else pytest.param(n, marks=pytest.mark.wide) for n in RECIPES]

ON_RANKS = RECIPES  # what `real` runs


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of the cell's processes held and computed."""
    return run_asked(request, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_cell_trains_as_one_process_and_holds_what_is_certified_and_predicted(
    name: str, real: Any
) -> None:
    recipe = RECIPES[name]
    assert_as_one_process(recipe, real[name])
    traced = assert_as_certified(recipe, real[name])
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    for rank, fake in enumerate(traced):
        predicted = predict_memory(model, recipe, CPU, rank)
        for phase in fake.phases.keys() - {Phase.LOAD, Phase.SAVE}:
            nbytes = fake.phases[phase]
            if recipe.compile == "blocks" and phase in WITHIN_BLOCKS:  # as on one device
                assert 0.85 * nbytes < predicted.live(phase) < 1.02 * nbytes, phase
                continue
            of_pairs = recipe.compares and phase is Phase.LOSS  # a few numbers a pair
            slack = SCALARS if phase in HOLD_SCALARS or of_pairs else 0
            assert predicted.live(phase) == pytest.approx(nbytes, abs=slack), phase


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_cell_is_accepted_where_a_test_trains_it_and_refused_elsewhere(
    technique: str, axis: str
) -> None:
    """So that no combination is accepted that nothing has proved."""
    refused = refusal(make_cell(technique, axis))
    assert bool(refused) != (axis in TRAINED[technique]), refused
    if technique in NOT_OURS:
        assert axis not in TRAINED[technique]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("objective", ["GRPO", "RLOO"])
def test_sampling_is_accepted_where_a_test_trains_it_and_refused_elsewhere(
    objective: str, axis: str
) -> None:
    refused = refusal(make_sampled(objective, axis))
    assert bool(refused) != (axis in SAMPLED["GRPO, RLOO"]), refused


def test_every_technique_says_where_it_trains() -> None:
    assert TRAINED.keys() == TECHNIQUES.keys() >= NOT_OURS.keys()
    assert all(set(axes) <= set(AXES) for axes in TRAINED.values())
