"""Many recipes at once are what each of them is alone, to the byte."""

import random

import numpy
import pytest
from megatron_jobs import DROPOUT, GPT

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import find_framework
from memfit.plan.frameworks.shared.columns import find_distinct, pick, take, with_columns
from memfit.plan.memory.bounds import find_bounds
from memfit.plan.memory.declared import describe_ledger, predict_ledger
from memfit.plan.request.problem import find_device
from memfit.plan.search.candidates import explain, span
from memfit.records import from_data
from memfit.records.request import Request

LLAMA = {
    "name": "llama", "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
MIXTRAL = {**LLAMA, "name": "mixtral", "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2}  # fmt: skip
DEEPSEEK = {
    "name": "deepseek", "model_type": "deepseek_v3", "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 2816, "moe_intermediate_size": 512, "num_hidden_layers": 13,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "n_group": 1, "topk_group": 1, "max_position_embeddings": 8192,
}  # fmt: skip
CASES = [
    (LLAMA, {}),
    (LLAMA, {"precision": "fp32", "options": {"transformer_impl": "local"}}),
    (LLAMA, {"precision": "fp8-mixed", "options": {"cp_comm_type": "a2a"}}),
    (LLAMA, {"method": "lora", "options": {"rank": "first"}}),
    (GPT, {"options": DROPOUT | {"transformer_impl": "legacy", "rank": "last"}}),
    (GPT, {"options": DROPOUT | {"cross_entropy_loss_fusion": "te", "num_experts": 8}}),
    (MIXTRAL, {"options": {"accumulate_allreduce_grads_in_fp32": False}}),
    (MIXTRAL, {"options": {"expert_tensor_parallel_size": 1, "expert_imbalance": 1.3}}),
    (DEEPSEEK, {}),
    (DEEPSEEK, {"options": {"recompute_modules": "mla_up_proj,moe_act,layernorm"}}),
    (DEEPSEEK, {"options": {"gradient_accumulation_fusion": False, "rank": "last"}}),
]


def ask(model, framework="megatron", devices=32, batch=96, length=2048, **more):
    request = {
        "model": model, "framework": framework,
        "hardware": {"device": "h100-sxm", "count": devices},
        "task": {"sequence_length": length, "global_batch": batch}, **more,
    }  # fmt: skip
    return from_data(request, Request, source="test")


def compare(space, seed, number=25):
    """Peaks of a sample of the candidates, alone and together; how many were compared."""
    rng, compared = random.Random(seed), 0
    for part in space.parts:
        peaks = [space.framework.measure(space.job(recipes)) for recipes in part.slices(1000)]
        bands = [
            find_bounds(space.framework, space.device, recipes.parallel, peak.peak)
            for recipes, peak in zip(part.slices(1000), peaks, strict=True)
        ]
        allocated = numpy.concatenate([peak.allocated for peak in peaks])
        totals = numpy.concatenate([band.total for band in bands])
        assert len(allocated) == part.size
        for row in rng.sample(range(part.size), min(part.size, number)):
            recipe = part.recipe_of(row)
            ledger = predict_ledger(recipe, space.model, space.device)
            alone = describe_ledger(ledger, recipe, space.device, None)
            assert allocated[row] == alone.peak_allocated, recipe
            assert totals[row] == alone.device_total
            compared += 1
    return compared


@pytest.mark.parametrize("case", range(len(CASES)))
def test_megatrons_candidates_are_what_each_is_alone(case):
    model, more = CASES[case]
    assert compare(span(ask(model, **more)), case) >= 50


@pytest.mark.parametrize("version", [202412, 202503, 202508])
@pytest.mark.parametrize(("precision", "loss"), [("bf16-mixed", "chunked"), ("fp8-mixed", "plain")])
def test_torchtitans_candidates_are_what_each_is_alone(version, precision, loss):
    deep = {"num_hidden_layers": 26, "vocab_size": 512}  # not the last rank is the fullest
    for model in (LLAMA | {"tie_word_embeddings": True}, LLAMA | deep):
        asked = ask(
            model, "torchtitan", precision=precision, loss=loss, options={"version": version}
        )
        assert compare(span(asked), version, 5) >= 100


def test_a_mesh_that_is_stated_leaves_few_columns():
    mesh = {"pp": 4, "virtual_pp": 1, "tp": 2, "dp_shard": 4, "zero": 1}
    assert compare(span(ask(LLAMA, parallel=mesh)), 1) >= 50
    mesh = mesh | {"zero": 3, "sequence_parallel": True}
    assert compare(span(ask(LLAMA, "torchtitan", parallel=mesh, micro_batch=2)), 1) >= 20


def test_columns_may_be_few():
    space = span(ask(LLAMA, recompute="selective", attention="flash"))
    recipe = space.parts[0].recipe_of(100)
    for name in ("accumulation", "micro_batch"):
        some = numpy.array([1, 2, 4])
        peaks = space.framework.measure(space.job(with_columns(recipe, {name: some})))
        alone = [with_columns(recipe, {name: n}) for n in (1, 2, 4)]
        ledgers = [predict_ledger(one, space.model, space.device) for one in alone]
        assert list(peaks.peak) == [ledger.peak for ledger in ledgers]


def test_a_band_is_that_of_each_recipe_alone():
    framework, device = find_framework("megatron"), find_device("h100-sxm")
    (recipes,) = span(ask(LLAMA, recompute="none", attention="flash", devices=8)).parts[0].slices()
    peak = numpy.arange(len(recipes.micro_batch)) * 10**9
    many = find_bounds(framework, device, recipes.parallel, peak)
    for row in range(0, len(peak), 7):
        one = find_bounds(framework, device, pick(recipes, row).parallel, int(peak[row]))
        assert (many.low[row], many.total[row], many.high[row]) == (one.low, one.total, one.high)
    unknown = find_device("cpu-x86")
    assert find_bounds(framework, unknown, recipes.parallel, peak).high is None


@pytest.mark.parametrize(
    "framework",
    ["nanotron", "megatron-deepspeed", "deepspeed", "hf-trainer", "trl", "torchtune", "litgpt"],
)
def test_other_frameworks_candidates_are_predicted_one_by_one(framework):
    model = LLAMA | {"num_hidden_layers": 4}
    space = span(ask(model, framework, devices=4, batch=16, length=512))
    assert not space.framework.arrays
    assert compare(space, 1, 4) >= 6
    for part in space.parts:
        recipe = part.recipe_of(part.size - 1)
        assert explain(space, recipe) is None
        assert (recipe.parallel.world, recipe.global_batch) == (4, 16)


def test_stages_of_zero_are_tried_where_the_framework_has_several():
    space = span(ask(LLAMA, "deepspeed", devices=2, batch=4, recompute="none"))
    assert set(space.parts[0].table["zero"]) == {1, 2, 3}
    alone = span(ask(LLAMA, "deepspeed", devices=1, batch=4, recompute="none"))
    assert set(alone.parts[0].table["zero"]) == {3}  # nothing is cut
    stated = ask(LLAMA, "deepspeed", devices=2, batch=4, parallel={"dp_shard": 2, "zero": 2})
    recipes = [part.recipe_of(0) for part in span(stated).parts]
    assert {recipe.parallel.zero for recipe in recipes} == {2}


def test_what_a_framework_refuses_is_left_out_with_its_own_sentence():
    space = span(ask(LLAMA, "hf-trainer", devices=4, batch=16))
    (refused,) = (removed for removed in space.removed if removed.rule == "hf-trainer")
    assert refused.number > 0
    assert "is not described" in refused.sentence
    with pytest.raises(InvalidRequest, match="one of both"):
        span(ask(LLAMA, "hf-trainer", devices=4, parallel={"dp_shard": 2, "dp_replicate": 2}))


def test_columns_go_into_a_recipe_and_out_of_it():
    recipe = span(ask(LLAMA)).parts[0].recipe
    name = "account_for_loss_in_pipeline_split"
    columns = {"micro_batch": numpy.array([1, 2]), "tp": numpy.array([4, 8]),
               name: numpy.array([True, False])}  # fmt: skip
    many = with_columns(recipe, columns)
    two = pick(many, 1)
    assert (two.micro_batch, two.parallel.tp, two.options[name]) == (2, 8, False)
    assert type(two.micro_batch) is int
    assert two == with_columns(recipe, {"micro_batch": 2, "tp": 8, name: False})
    assert list(take(many, slice(1, 2)).parallel.tp) == [8]
    assert take(recipe, 0) is recipe


def test_distinct_rows():
    a, b = numpy.array([5, 5, 7, 5]), numpy.array([True, False, True, True])
    first, which = find_distinct([a, 3, b], 4)
    rows = [(a[i], b[i]) for i in first]
    assert len(rows) == len(set(rows)) == 3
    assert [rows[i] for i in which] == list(zip(a, b, strict=True))
    first, which = find_distinct([numpy.array([4, 4]), 1], 2)
    assert (list(first), list(which)) == ([0], [0, 0])
    first, which = find_distinct([7, True], 3)
    assert (list(first), list(which)) == ([0], [0, 0, 0])
