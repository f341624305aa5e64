"""GRPO and RLOO on two ranks: what one process learns, within certificate and prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_cells import SAMPLED as CELLS
from mesh_cells import make_sampled
from rank_runs import run_asked
from rank_worker import alone
from sampled_ranks import SAMPLED
from tiny_steps import CPU

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify.iterations import trace_iterations
from memfit.certify.tracing.recorder import Trace
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Phase

ON = CELLS["GRPO, RLOO"]
RECIPES = {
    f"{technique} on {axis}": make_sampled(technique, axis)
    for technique, asked in SAMPLED.items()
    for axis in ON
    if axis != "ep" or "config" not in asked
}
TOLD = ("GRPO on FSDP2", "RLOO on ep", "GRPO, other prompts for ties on copies")
NAMES = [n if n in TOLD else pytest.param(n, marks=pytest.mark.wide) for n in RECIPES]
SCALARS = 16  # bytes of 0-dim results that a step's caller may still hold

ON_RANKS = RECIPES  # what `real` runs


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of a recipe's processes held and learned."""
    return run_asked(request, tmp_path_factory)


def certified(fake: Trace, found: dict[str, Any]) -> dict[Phase, int]:
    """What the certificate says of the phases that a rank measured."""
    return {phase: fake.phases[phase] for phase in found["phases"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ranks_learn_what_one_process_does_and_hold_what_is_certified_and_predicted(
    name: str, real: Any
) -> None:
    recipe, ranks = RECIPES[name], real[name]
    traces = [trace_iterations(recipe, CPU, rank=rank) for rank in range(len(ranks))]
    want = alone(recipe)
    for rank, (found, fake) in enumerate(zip(ranks, traces, strict=True)):
        for key in ("samples", "failures", "tokens"):
            assert found[key] == want[key], key  # the same answers, judged alike
        for mine, theirs in zip(found["figures"], want["figures"], strict=True):
            for key, value in theirs.items():
                assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
        for mine, theirs in zip(found["gradients"], want["gradients"], strict=True):
            assert mine.keys() == theirs.keys()
            largest = max(float(value.abs().max()) for value in theirs.values())
            for key, value in theirs.items():
                torch.testing.assert_close(
                    mine[key], value, rtol=1e-5, atol=1e-5 * largest, msg=key
                )
        assert certified(fake, found) == found["phases"]
        kinds = {phase: fake.ledger.by_kind(phase) for phase in found["phases"]}
        assert kinds == found["kinds"]
        model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
        predicted = predict_memory(model, recipe, catalog.find_device("cpu-x86"), rank)
        for phase in fake.phases.keys() - {Phase.LOAD, Phase.SAVE}:
            slack = SCALARS if phase in (Phase.FIRST_STEP, Phase.OPTIMIZER_STEP) else 0
            assert predicted.live(phase) == pytest.approx(fake.phases[phase], abs=slack), phase


def test_answers_differ_in_length_and_prompts_in_what_they_are_worth() -> None:
    """Else ranks would take equally many steps, and advantages would need no other rank."""
    found = alone(RECIPES["GRPO on FSDP2"])
    assert found["figures"][0]["length"] < RECIPES["GRPO on FSDP2"].rollout.max_completion_length
    assert found["figures"][0]["reward_std"] > 0.1
    assert any(found["failures"])
