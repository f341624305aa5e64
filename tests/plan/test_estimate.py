"""The search's estimate: the same whether its lines are simulated or answered by a closed form."""

from typing import Any

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.adapters import find_adapter
from memfit.catalog import find_device
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_peak
from memfit.plan.request.problem import first_recipe, read_problem
from memfit.plan.search import estimate
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.estimate import Estimate, count_least
from memfit.plan.simulate import closed_form
from memfit.plan.simulate.recompute import RecomputedBlocks
from memfit.records.recipe import Parallel

# one model of each family whose blocks alternate attention, and one whose blocks are all alike
ALTERNATING = {"gemma-2-2b": 26, "gemma-3-1b": 26, "smollm3-3b": 36, "qwen3.5-9b": 32}
ALIKE = {"llama-3.2-3b": 28}
LENGTHS = (96, 256, 640, 1536, 2000)  # shorter and longer than a chunk of the loss


def test_an_estimate_of_any_length_is_that_of_a_search_for_this_length_alone(monkeypatch):
    problem = read_problem(api.read("pythia-70m", device="rtx-4090"))
    start = Candidate.of(problem, first_recipe(problem, method="full", precision="bf16-mixed"))

    def peaks(length):
        recipe = replace(start.recipe, sequence_length=length, accumulation=16)
        made = Estimate(start.model, recipe, problem.device)
        return [
            made.peak(micro, again, chunk)
            for micro in (1, 4)
            for again in (RecomputedBlocks(0, 0), RecomputedBlocks(2, 1), RecomputedBlocks(6, 0))
            for chunk in (0, 512)
        ]

    def forget():
        closed_form.find_answers.cache_clear()
        estimate._draw.cache_clear()

    alone = []
    for length in LENGTHS:
        forget()
        alone.append(peaks(length))
    forget()
    simulated = []
    record = closed_form.record
    monkeypatch.setattr(closed_form, "record", lambda *a: simulated.append(a) or record(*a))
    assert [peaks(length) for length in LENGTHS] == alone
    known = len(simulated)
    assert known > 0
    assert peaks(1800)
    assert len(simulated) == known  # what is known answers for it


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("name", "layers"), [
    *(pytest.param(n, layers, marks=[pytest.mark.wide] if n == "gemma-2-2b" else [])  # as Gemma 3
      for n, layers in ALTERNATING.items()),
    *ALIKE.items(),
])  # fmt: skip
def test_an_estimate_is_near_the_prediction_under_every_treatment_of_blocks(name, layers, method):
    problem = read_problem(api.read(name, device="h100-sxm"))
    first = first_recipe(problem, method=method, precision="bf16-mixed")
    start = Candidate.of(problem, first)
    assert estimate.applies(start.model)
    assert len(estimate.find_kinds(start.model.architecture)) == 1 + (name in ALTERNATING)
    treatments = [
        RecomputedBlocks(0, 0), RecomputedBlocks(layers // 3, 0), RecomputedBlocks(0, layers // 3),
        RecomputedBlocks(layers // 4, layers // 2),
        RecomputedBlocks(1, 1), RecomputedBlocks(0, layers), RecomputedBlocks(layers, 0),
    ]  # fmt: skip
    for length, micro in ((2048, 4), (8192, 1)):  # shorter and longer than Gemma 2's window
        recipe = replace(start.recipe, sequence_length=length, micro_batch=micro, accumulation=8)
        made = Estimate(start.model, recipe, problem.device)
        for at, again in enumerate(treatments):  # each with either loss at one of the lengths
            for chunk in (0, 1024) if not at else ((0, 1024)[(at + micro // 4) % 2],):
                loss = {"loss": "chunked" if chunk else "plain", "loss_chunk": chunk}
                exact = Candidate(
                    problem, replace(recipe, **again.knobs, **loss), start.model, start.totals
                )
                error = made.peak(micro, again, chunk) / exact.peak - 1
                assert abs(error) < 0.02, (length, micro, again, chunk)


def test_adapters_that_the_first_block_has_not_are_estimated_too():
    """Of Qwen3.5's first three blocks none has a query's projection. They keep nothing for a
    backward, which an estimate takes from the prediction that it is anchored to."""
    problem = read_problem(api.read("qwen3.5-9b", device="h100-sxm"))
    first = first_recipe(problem, method="lora", precision="bf16-mixed")
    first = replace(
        first, lora=replace(first.lora, targets=("q_proj", "v_proj")), sequence_length=2048,
        micro_batch=2, accumulation=8, loss="chunked", loss_chunk=1024,
    )  # fmt: skip
    start = Candidate.of(problem, first)
    assert min(w.layer for w in start.model.weights if w.trainable) == 3
    made = Estimate(start.model, start.recipe, problem.device)
    assert 0 <= made.peak(2, RecomputedBlocks(0, 0), 1024) / start.peak - 1 < 0.1


H100 = find_device("h100-sxm")
BOUNDED: dict[str, tuple[dict[str, Any], Parallel]] = {
    "full": ({}, Parallel()),
    "pure bf16": ({"precision": "bf16"}, Parallel()),
    "states in 8 bits": ({"optimizer.name": "adamw8bit"}, Parallel()),
    "a rank of factors": ({"optimizer.name": "adafactor"}, Parallel()),
    "within backward": ({"optimizer.in_backward": True, "micro_batch": 4,
                         "optimizer.clip_norm": 0}, Parallel()),
    "states on the host": ({"offload": "optimizer", "micro_batch": 4, "optimizer.clip_norm": 0},
                           Parallel()),
    "activations on the host": ({"offload": "activations"}, Parallel()),
    "lora": ({"method": "lora"}, Parallel()),
    "over nf4": ({"method": "lora", "base_format": "nf4"}, Parallel()),
    "shards": ({}, Parallel(dp_shard=8)),
    "shards of adapters": ({"method": "lora"}, Parallel(dp_shard=3)),
    "copies": ({}, Parallel(dp_replicate=4)),
    "shared products": ({"lean": "none"}, Parallel(dp_shard=2, tp=2, sequence_parallel=True)),
    "stages": ({"lean": "none"}, Parallel(dp_shard=2, pp=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_no_prediction_is_below_what_is_always_there(name: str) -> None:
    """A search leaves out unseen what needs more: one row of few tokens is the hardest case."""
    changes, parallel = BOUNDED[name]
    stated = {
        "method": "full", "precision": "bf16-mixed", "micro_batch": 1, "recompute": "full",
        "loss": "plain", "task.sequence_length": 64, "task.global_batch": 4, "task.packing": False,
    } | changes  # fmt: skip
    name = "llama-3.1-8b" if parallel.tp * parallel.pp > 1 else "pythia-70m"
    recipe = api.predict(api.read(name, device="h100-sxm", changes=stated)).recipe
    recipe = replace(recipe, parallel=parallel)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    least = count_least(model, recipe, H100)
    peak = predict_peak(model, recipe, H100)
    assert 0.15 * peak < least <= peak


@pytest.mark.parametrize("micro", [2, 16])
def test_an_estimate_of_a_policy_and_its_value_is_near_the_prediction(micro):
    """PPO's step has passes of the policy and then of the value, alone or with a later one each."""
    changes = {"task.objective": "ppo", "reward.funcs": ["length"], "method": "lora"}
    check_policy_and_value("pythia-160m", micro, changes)


def test_the_estimate_of_a_values_pass_has_the_policys_gradients_beside_it():
    """Of adapters so large that the value's pass, the second one, is the highest."""
    changes = {
        "task.objective": "ppo", "reward.funcs": ["length"], "method": "lora", "lora.rank": 512,
        "lora.targets": "all-linear", "rollout.max_prompt_length": 16,
        "rollout.max_completion_length": 16,
    }  # fmt: skip
    check_policy_and_value("pythia-160m", 16, changes, within=0.015)


def check_policy_and_value(model, micro, changes, within=0.02):
    problem = read_problem(api.read(model, device="rtx-4090", changes=changes))
    first = first_recipe(problem, method="lora", precision="bf16-mixed")
    start = Candidate.of(problem, first)
    recipe = replace(start.recipe, micro_batch=micro, accumulation=16 // micro)
    made = Estimate(start.model, recipe, problem.device)
    for again in (RecomputedBlocks(0, 0), RecomputedBlocks(6, 0), RecomputedBlocks(0, 12)):
        exact = Candidate(problem, replace(recipe, **again.knobs), start.model, start.totals)
        assert made.peak(micro, again, recipe.loss_chunk) == pytest.approx(exact.peak, rel=within)
