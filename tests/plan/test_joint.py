"""The search over every mesh, held against predicting each candidate on its own."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.core.units import GIB
from memfit.plan.memory.declared import describe_ledger, predict_ledger
from memfit.plan.request.problem import find_usable, read_problem
from memfit.plan.request.wording import state
from memfit.plan.search import exhaustive
from memfit.plan.search.candidates import span
from memfit.plan.search.search import _find_best, predict_request
from memfit.plan.step_time.read import read_setting, time_recipes
from memfit.plan.step_time.step import predict_step
from memfit.records import from_data
from memfit.records.request import Request

LLAMA = {
    "name": "llama", "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {**LLAMA, "num_hidden_layers": 2}
MIXTRAL = {**LLAMA, "name": "mixtral", "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2}  # fmt: skip


def ask(model=LLAMA, framework="megatron", count=4, batch=8, memory="", **more):
    request = {
        "model": model, "framework": framework, "hardware": {"device": "h100-sxm", "count": count},
        "task": {"sequence_length": 4096, "global_batch": batch, "steps": 100},
        "limits": {"memory": memory}, **more,
    }  # fmt: skip
    return from_data(request, Request, source="test")


@pytest.mark.parametrize("memory", ["4 GiB", "12 GiB", "60 GiB"])
@pytest.mark.parametrize(("framework", "count"), [("trl", 1), ("hf-trainer", 2), ("deepspeed", 2)])
def test_a_brief_search_predicts_less_and_chooses_the_same(framework, count, memory, monkeypatch):
    """What fits, at risk, or does not fit; of what fits, nothing that is slower is predicted."""
    problem = read_problem(ask(SMALL, framework, count, memory=memory))
    asked = []
    predict = type(problem.framework).predict
    monkeypatch.setattr(
        type(problem.framework), "predict", lambda *own: asked.append(own) or predict(*own)
    )
    whole = _find_best(problem).plan
    every = len(asked)
    brief = _find_best(replace(problem, brief=True)).plan
    assert replace(brief, considered=()) == replace(whole, considered=())
    assert [row for row in whole.considered if row.chosen] == [
        row for row in brief.considered if row.chosen
    ]
    few = len(asked) - every
    assert few < every / 2 if whole.memory.verdict == "fits" else few < every


def one_by_one(request):
    """(seconds, low, high, recipe) of every candidate, each predicted alone."""
    space = span(request)
    for part in space.parts:
        for row in range(part.size):
            recipe = part.recipe_of(row)
            ledger = predict_ledger(recipe, space.model, space.device)
            memory = describe_ledger(ledger, recipe, space.device, None)
            seconds = predict_step(read_setting(recipe, space.model, space.device)).total
            yield seconds, memory.device_total, recipe


@pytest.mark.parametrize(
    ("model", "framework", "memory"),
    [
        (LLAMA, "megatron", "18 GiB"),
        (LLAMA, "torchtitan", "18 GiB"),
        (MIXTRAL, "megatron", "40 GiB"),
    ],
    ids=["megatron", "torchtitan", "experts"],
)  # fmt: skip
def test_nothing_faster_fits(model, framework, memory):
    request = ask(model, framework, memory=memory, attention="flash", recompute="selective")
    space = span(request)
    usable = find_usable(request, space.device)[0]
    found = exhaustive.explore(space, usable)
    every = list(one_by_one(request))
    assert found.size == len(every) > 50
    best = found.fitting[0]
    by_recipe = {recipe: (seconds, total) for seconds, total, recipe in every}
    for point in (*found.fitting, *found.front, *found.beyond, found.smallest):
        seconds, total = by_recipe[point.recipe]
        assert point.seconds == pytest.approx(seconds, rel=1e-12)
        assert point.total == total
        assert point.low <= point.total <= point.high
    # the upper end of the band is what must fit
    slack = best.high - best.total
    surely = [s for s, total, _ in every if total + 2 * slack + GIB <= usable]
    assert surely
    assert best.seconds <= min(surely) * (1 + 1e-12)
    assert all(point.high <= usable for point in (*found.fitting, *found.front))
    assert all(point.low > usable for point in found.beyond)


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_seconds_of_many_are_those_of_each(framework):
    request = ask(MIXTRAL if framework == "megatron" else LLAMA, framework, count=8, batch=32)
    space = span(request)
    rng = random.Random(1)
    for part in space.parts:
        rows = 0
        for recipes in part.slices(1000):
            many = time_recipes(recipes, space.model, space.device)
            for row in rng.sample(range(len(many)), min(8, len(many))):
                recipe = part.recipe_of(rows + row)
                alone = predict_step(read_setting(recipe, space.model, space.device)).total
                assert many[row] == pytest.approx(alone, rel=1e-12)
            rows += len(many)


def test_the_front_is_every_candidate_that_none_beats():
    request = ask(memory="30 GiB", attention="flash", recompute="selective")
    space = span(request)
    slices = list(exhaustive.slices(space))
    points = [slice_.point(row) for slice_ in slices for row in range(len(slice_.seconds))]
    fitting = [p for p in points if p.high <= 30 * GIB]
    beaten = {
        id(p)
        for p in fitting
        if any(
            (o.seconds, o.high) != (p.seconds, p.high)
            and o.seconds <= p.seconds
            and o.high <= p.high
            for o in fitting
        )
    }
    want = {(p.seconds, p.high) for p in fitting if id(p) not in beaten}
    front = exhaustive.explore(space, 30 * GIB).front
    assert {(p.seconds, p.high) for p in front} == want
    assert len(want) > 3
    assert [p.seconds for p in front] == sorted(p.seconds for p in front)


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["dense", "experts"])
def test_a_large_space_has_the_same_fastest(model, monkeypatch):
    request = ask(model, count=8, batch=32)
    space = span(request)
    for gib in (8, 20, 60):
        whole = exhaustive.explore(space, gib * GIB)
        with monkeypatch.context() as patched:
            patched.setattr(exhaustive, "WHOLE", 0)
            lean = exhaustive.explore(space, gib * GIB)
        assert [p[:2] for p in lean.fitting[:20]] == [p[:2] for p in whole.fitting[:20]]
        assert lean.front[0] == whole.front[0] if whole.front else not lean.front
        if not whole.fitting:
            assert lean == whole


def test_a_candidate_stated_as_a_request_is_the_same_recipe():
    rng = random.Random(2)
    for framework in ("megatron", "torchtitan"):
        request = ask(framework=framework, count=8, batch=32)
        space = span(request)
        for part in space.parts:
            for row in rng.sample(range(part.size), 10):
                recipe = part.recipe_of(row)
                stated = state(request, recipe, space.framework)
                assert predict_request(stated).recipe == recipe


@settings(max_examples=15)
@given(less=st.integers(6, 60), more=st.integers(0, 40))
def test_a_looser_limit_never_takes_longer(less, more):
    request = ask(attention="flash", recompute="selective")
    space = span(request)
    tight, loose = (exhaustive.explore(space, n * GIB).fitting for n in (less, less + more))
    if tight:
        assert loose[0].seconds <= tight[0].seconds


SMALLEST = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize(("model", "batch"), [(SMALLEST, 16), (LLAMA, 64), (MIXTRAL, 16)])
def test_more_devices_never_take_longer(framework, model, batch):
    if framework == "torchtitan" and model is MIXTRAL:
        pytest.skip("torchtitan's experts are not described")
    seconds = []
    for nodes, count in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8)):
        hardware = {"device": "h100-sxm", "count": count, "nodes": nodes}
        request = ask(model, framework, batch=batch, hardware=hardware, attention="flash")
        seconds.append(api.plan(request, levers=False).time.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_idle_devices_are_said():
    request = ask(
        SMALLEST, task={"sequence_length": 128, "global_batch": 8}, attention="flash",
        hardware={"device": "h100-sxm", "count": 8, "nodes": 4},
    )  # fmt: skip
    plan = api.plan(request, levers=False)
    world = plan.recipe.parallel.world
    assert world < 32
    assert any(f"uses {world} of 32 devices" in said for said in plan.assumptions)
    assert (
        exhaustive.explore_all(read_problem(request), request).chosen.seconds
        > plan.time.step_seconds
    )
    assert plan.request == request


@settings(max_examples=10)
@given(share=st.floats(0.3, 1), what=st.sampled_from(["bandwidth", "flops"]))
def test_a_slower_device_never_has_a_faster_plan(share, what):
    request = ask(attention="flash", recompute="selective")
    space = span(request)
    device = space.device
    if what == "bandwidth":
        slower = replace(device, bandwidth=device.bandwidth * share)
    else:
        slower = replace(
            device, flops={k: v * share for k, v in device.flops.items()},
            flops_measured={k: v * share for k, v in device.flops_measured.items()},
        )  # fmt: skip
    usable = find_usable(request, space.device)[0]
    fast, slow = (exhaustive.explore(space._replace(device=d), usable) for d in (device, slower))
    assert slow.fitting[0].seconds >= fast.fitting[0].seconds


def test_a_plan_says_what_else_there_was():
    plan = api.plan(ask(memory="11 GiB"), levers=False)
    assert plan.memory.verdict == "fits"
    (chosen,) = [row for row in plan.considered if row.chosen]
    assert chosen.because == "the fastest that fits"
    assert chosen.device_total == plan.memory.device_total
    others = [row for row in plan.considered if not row.chosen]
    assert {row.fits for row in others} == {True, False}
    assert all(row.relative_time >= 1 for row in others if row.fits)
    assert all(row.relative_time < 1 for row in others if not row.fits)
    assert plan.time.step_seconds
    assert plan.request.parallel == "auto"
    assert any("configurations, none left out" in said for said in plan.assumptions)


def test_what_cannot_fit_is_the_nearest_miss():
    plan = api.plan(ask(memory="2 GiB"), levers=False)
    assert plan.memory.verdict == "does_not_fit"
    (chosen,) = [row for row in plan.considered if row.chosen]
    assert chosen.because == "the nearest miss"


@pytest.mark.parametrize(("key", "limit"), [("time", "1 s"), ("cost", "0.01 USD")])
def test_a_limit_of_time_or_money_that_nothing_meets(key, limit):
    request = ask(memory="60 GiB", attention="flash")
    request = replace(request, limits=replace(request.limits, **{key: limit}))
    with pytest.raises(DoesNotFit, match=f"`limits.{key}` is {limit}") as error:
        api.plan(request)
    assert "--devices" in error.value.hint


def test_a_framework_whose_bytes_are_unknown_says_so():
    with pytest.raises(InvalidRequest, match="memory"):
        api.plan(ask(framework="composer"))


@pytest.mark.parametrize("framework", ["nanotron", "deepspeed", "hf-trainer", "megatron-deepspeed"])
def test_frameworks_without_arrays_are_searched_too(framework):
    request = ask(framework=framework, count=2, batch=4, precision="bf16-mixed")
    plan = api.plan(request, levers=False)
    assert plan.recipe.framework == framework
    assert plan.recipe.parallel.world == 2
    assert plan.time.step_seconds
