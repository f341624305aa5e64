"""Experts dealt to ranks: real runs of 2 and 4 against one process, certificate and plan."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_cells import refusal
from rank_runs import assert_as_certified, assert_as_one_process, run_asked
from tiny_steps import CONFIGS, CPU, make_recipe

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.meta.layers.routing import count_received
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Phase
from memfit.records.recipe import Parallel, Recipe
from memfit.train.distributed.dealt import Received
from memfit.train.step.build import build_model

EVEN = Parallel(dp_shard=2, ep=2, ep_imbalance=1.0)
PARTS = Parallel(dp_shard=4, ep=2, ep_imbalance=1.0)
KEPT = Parallel(dp_shard=4, ep=2, ep_imbalance=1.0, reshard_after_forward=False)
COPIES = Parallel(dp_replicate=2, dp_shard=2, ep=2, ep_imbalance=1.0)
UNEVEN = Parallel(dp_shard=2, ep=2, ep_imbalance=1.5)
MACHINE = catalog.find_device("cpu-x86")
SCALARS = 16  # bytes of 0-dim results that a step's caller may still hold


def make(family: str = "mixtral", parallel: Parallel = EVEN, **changes: Any) -> Recipe:
    config = {**CONFIGS[family], "num_hidden_layers": 2}
    return make_recipe(
        family, config=config, **{"parallel": parallel, "sequence_length": 32, **changes}
    )


CASES: dict[str, Recipe] = {
    "full": make(),
    "each part on two ranks": make(parallel=PARTS, accumulation=2, recompute_blocks=1),
    "copies": make("qwen3_moe", parallel=COPIES),
    "kept gathered, mixed": make("qwen3_moe", KEPT, precision="bf16-mixed"),
    "packed, selective": make(
        "qwen3_moe", precision="bf16-mixed", packing=True, selective_blocks=2
    ),
    "chunked, foreach": make(
        "glm4_moe", loss="chunked", loss_chunk=20, implementation="foreach", recompute_blocks=2
    ),
    "in backward": make(in_backward=True, clip_norm=0.0),
    "pure bf16": make("qwen2_moe", precision="bf16", base_format="bf16"),
    "biases, sinks": make("gpt_oss"),
    "groups": make("deepseek_v3", parallel=PARTS, recompute_blocks=1),
    "groups by softmax": make("deepseek_v2", parallel=PARTS),
}
# "full" has nothing that these have not
TOLD = ("each part on two ranks", "kept gathered, mixed", "biases, sinks")
NAMES = [n if n in TOLD else pytest.param(n, marks=pytest.mark.wide) for n in CASES]
LOPSIDED = {"uneven": make(parallel=UNEVEN)}

ON_RANKS = CASES | LOPSIDED  # what `real` runs


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of the case's processes held and computed."""
    return run_asked(request, tmp_path_factory)


def predict(recipe: Recipe, rank: int) -> Any:
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    return predict_memory(model, recipe, MACHINE, rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ranks_learn_what_one_process_does_and_hold_what_is_certified_and_predicted(
    name: str, real: Any
) -> None:
    recipe = CASES[name]
    assert_as_one_process(recipe, real[name])
    ends = (0, recipe.parallel.world - 1)  # of all ranks, those that are traced
    traced = assert_as_certified(recipe, real[name])
    for rank, fake in zip(ends, traced, strict=True):
        for phase in fake.phases.keys() - {Phase.LOAD, Phase.SAVE}:
            predicted = predict(recipe, rank).live(phase)
            assert predicted == pytest.approx(fake.phases[phase], abs=SCALARS), (rank, phase)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOPSIDED)
def test_the_certificate_is_of_the_rank_that_receives_the_most(name: str, real: Any) -> None:
    """Routed as far from even as the recipe allows: the rank that receives it holds what is
    certified, to the byte, and the other one less."""
    recipe = LOPSIDED[name]
    most, least = real[name]
    fake = trace(recipe, CPU, rank=0)
    for phase, nbytes in most["phases"].items():
        assert nbytes == fake.phases[phase], phase
        assert predict(recipe, 0).live(phase) == pytest.approx(nbytes, abs=SCALARS), phase
    even = trace(CASES["full"], CPU, rank=0)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert least["phases"][phase] < most["phases"][phase]
        assert even.phases[phase] < most["phases"][phase]


@pytest.mark.parametrize("parallel", [Parallel(dp_shard=8, ep=2), Parallel(dp_shard=8, ep=4)])
@pytest.mark.parametrize("rank", [pytest.param(3, marks=pytest.mark.wide), 7])
def test_saving_and_all_else_is_predicted_on_more_ranks(parallel: Parallel, rank: int) -> None:
    """Of ranks that write no file, which hold no more than they gather, and of experts that a
    recomputed block gathers before their backward begins: shared experts' comes first."""
    recipe = make("deepseek_v3", parallel, recompute_blocks=1)
    fake = trace(recipe, CPU, rank=rank)
    for phase in fake.phases.keys() - {Phase.LOAD}:
        predicted = predict(recipe, rank).live(phase)
        assert predicted == pytest.approx(fake.phases[phase], abs=SCALARS), phase


@pytest.mark.parametrize("ep", [2, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 4))])
def test_all_ranks_together_hold_each_expert_once(ep: int) -> None:
    """torch's own shards, on every rank of a fake world, are as large as what is declared."""
    recipe = make("qwen3_moe", Parallel(dp_shard=4, ep=ep))
    held = 0
    for rank in range(4):
        ledger = trace(recipe, CPU, rank=rank).ledger.by_kind(Phase.LOAD)
        held += ledger["parameters"]
    buffers = 4 * 2 * 8 * 4  # frequencies of a head of 16, twice on each rank
    assert held == read_model(recipe.model).parameters * 4 + buffers


def test_no_rank_receives_more_than_all_send() -> None:
    """So that on two ranks the usual bound holds whatever the routing."""
    assert Parallel(dp_shard=2, ep=2).received == 2
    assert Parallel(dp_shard=2, ep=2, ep_imbalance=3.0).received == 2
    assert Parallel(dp_shard=8, ep=8, ep_imbalance=3.0).received == 3


def test_a_rank_receives_what_it_sends_of_an_even_routing() -> None:
    assert count_received(64, 1.0) == 64
    assert count_received(64, 1.25) == 80
    assert count_received(3, 1.5) == 4


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (make("llama"), "`parallel.ep: 2` divides experts among ranks, and `llama` has none"),
        (make(parallel=Parallel(dp_shard=4, ep=3)), "does not divide `parallel.dp_shard: 4`"),
        (make(parallel=Parallel(dp_shard=8, ep=2)), "does not divide the 4 experts of `mixtral`"),
        (
            make(parallel=Parallel(dp_shard=2, ep=2, pp=2)),
            "stages are written for",
        ),
        (
            make(parallel=Parallel(dp_shard=2, ep=2, cp=2)),
            "`parallel.cp: 2` is not built beside expert parallelism",
        ),
        (make(offload="parameters"), "`offload: parameters` is not built for such ranks"),
    ],
)
def test_what_is_not_built_is_refused_by_name(recipe: Recipe, reason: str) -> None:
    assert reason in refusal(recipe)


def test_no_shared_expert_stands_beside_dealt_ones_in_a_selective_recomputation() -> None:
    """Its backward would gather them in the recomputation, which the forward did not do."""
    with pytest.raises(InvalidRequest, match="would be gathered again"):
        build_model(make("glm4_moe", selective_blocks=1), "meta")


def test_routing_is_counted_and_the_most_is_taken_once() -> None:
    received = Received()
    received.note(80, 64)
    received.note(48, 64)
    assert received.take() == 1.25
    assert received.take() == 0.0
