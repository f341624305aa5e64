"""The levers: each turns one knob, is named as `--set` takes it, and can run."""

import msgspec
import pytest

from memfit import api
from memfit.optimizers.shared.offloaded import check_offload
from memfit.parallelism.limits import check_ranks
from memfit.plan.request.as_stated import read_stated
from memfit.plan.request.problem import read_problem
from memfit.plan.search.levers import EXACT, changed, knobs, turn
from memfit.records import from_data
from memfit.records.recipe import Parallel
from memfit.records.request import Request

pytestmark = pytest.mark.levers

MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
STATED = {
    "model": MODEL, "method": "full", "precision": "fp32", "recompute": {"blocks": 2},
    "loss": "plain", "micro_batch": 2, "attention": "flash", "optimizer": {"name": "adamw"},
    "task": {"sequence_length": 64, "global_batch": 8}, "hardware": {"device": "cpu"},
}  # fmt: skip
CASES = [
    {}, {"loss": "chunked", "loss_chunk": 64, "precision": "bf16-mixed"},
    {"method": "lora", "weights": "random"}, {"recompute": "full", "micro_batch": 8},
    {"hardware": {"device": "h100-sxm"}, "attention": "efficient"},
    {"optimizer": {"name": "adamw8bit", "implementation": "loop"}},
    {"optimizer": {"name": "adamw4bit"}, "hardware": {"device": "h100-sxm"},
     "attention": "efficient"},
    {"optimizer": {"name": "sgd", "implementation": "loop"}, "micro_batch": 1},
    {"hardware": {"device": "h100-sxm"}, "attention": "flash", "precision": "bf16-mixed",
     "optimizer": {"name": "adamw", "clip_norm": 0.0}, "offload": "optimizer", "micro_batch": 8},
]  # fmt: skip


def ask(**changes):
    return from_data({**STATED, **changes}, Request, source="the test")


def put(request, changes):
    return api.change(request, changes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_setting_a_levers_changes_gives_its_recipe_and_nothing_else(case):
    """The words that a user is told to type plan to the very recipe that was judged."""
    request = ask(**case)
    recipe = api.plan(request, levers=False).recipe
    levers = list(turn(read_problem(request), recipe))
    for lever in levers:
        assert api.plan(put(request, lever.changes), levers=False).recipe == lever.recipe, (
            lever.changes
        )
        turned = set(lever.changes) - {"loss_chunk", "base_format"}  # they follow
        if "optimizer.name" in turned:  # not every optimizer has every implementation
            turned -= {"optimizer.implementation"}
        assert len(turned) == 1, lever.changes
    assert len({msgspec.json.encode(lever.recipe) for lever in levers}) == len(levers)


def test_every_kind_of_lever_is_there_and_exact_ones_come_first():
    request = ask()
    levers = [c for c, _ in turn(read_problem(request), api.plan(request, levers=False).recipe)]
    assert levers == [
        {"recompute": "none"}, {"recompute": "full"},
        {"micro_batch": 1}, {"micro_batch": 4},
        {"loss": "chunked", "loss_chunk": 1024}, {"optimizer.implementation": "foreach"},
        {"optimizer.implementation": "loop"}, {"lean": "none"}, {"attention": "math"},
        {"precision": "bf16-mixed"},
        {"optimizer.name": "adamw8bit", "optimizer.implementation": "loop"},
        {"optimizer.name": "sgd"},
    ]  # fmt: skip
    exact = [set(c) <= set(EXACT) for c in levers]
    assert exact == sorted(exact, reverse=True)
    half = api.predict_with_levers(ask(recompute="full"))
    assert {"recompute": {"blocks": 2}} in [c.changes for c in half.levers]
    pretrained = read_problem(api.read("gpt2", device="cpu", changes={"method": "full"}))
    turned = turn(pretrained, api.plan(pretrained.request, levers=False).recipe)
    assert {"method": "lora"} in [lever.changes for lever in turned]


@pytest.mark.parametrize(("clip", "offered"), [(0.0, True), (1.0, False)])
def test_states_on_the_host_are_offered_where_they_can_be_and_told_with_their_time(clip, offered):
    own = {"name": "adamw", "clip_norm": clip}
    stated = ask(hardware={"device": "h100-sxm"}, optimizer=own, attention="efficient")
    plan = api.predict_with_levers(stated)
    found = [row for row in plan.levers if row.changes == {"offload": "optimizer"}]
    assert bool(found) == offered
    assert all(row.peak_allocated < plan.memory.peak_allocated for row in found)
    assert all(row.relative_time > 1 for row in found)


def test_what_changes_the_result_says_so_and_nothing_else_does():
    plan = api.plan(
        api.read("pythia-70m", device="rtx-4090", changes={"task.sequence_length": 1024})
    )
    learned = {"method", "precision", "optimizer.name", "base_format"}
    said = [row for row in plan.levers if "changes what is learned" in row.because]
    assert {key for row in said for key in row.changes} == learned
    others = [row.changes for row in plan.levers if row not in said]
    assert {"recompute": "full"} in others
    assert not [changes for changes in others if learned & set(changes)]


def test_a_precision_that_brings_another_kernel_is_still_a_lever():
    plan = api.predict_with_levers(ask(hardware={"device": "h100-sxm"}, attention="auto"))
    (mixed,) = [row for row in plan.levers if row.changes.get("precision") == "bf16-mixed"]
    assert mixed.changes["attention"] == "flash"
    assert not [row for row in plan.levers if set(row.changes) == {"attention"}]


def test_a_head_with_an_adapter_has_no_chunked_loss():
    request = ask(method="lora", lora={"rank": 4, "targets": ["lm_head"]}, weights="random")
    levers = [c for c, _ in turn(read_problem(request), api.plan(request, levers=False).recipe)]
    assert not any("loss" in changes for changes in levers)


def test_knobs_name_what_differs():
    plain, other = (
        api.plan(ask(), levers=False).recipe,
        api.plan(ask(recompute="full", micro_batch=4), levers=False).recipe,
    )
    assert changed(plain, other, 5) == {"recompute": "full", "micro_batch": 4}
    assert changed(plain, plain, 5) == {}
    assert knobs(plain, 5)["recompute"] == {"blocks": 2}


def test_levers_of_many_ranks_keep_the_mesh_and_what_it_can_run():
    request = ask(
        hardware={"device": "h100-sxm", "count": 4}, attention="efficient", micro_batch=2,
        parallel={"dp_shard": 4}, task={"sequence_length": 64, "global_batch": 16},
    )  # fmt: skip
    recipe = read_stated(request).recipe
    levers = list(turn(read_problem(request), recipe))
    for lever in levers:
        assert lever.recipe.parallel == recipe.parallel
        assert lever.recipe.global_batch == 16
        assert read_stated(put(request, lever.changes)).recipe == lever.recipe, lever.changes
    (sgd,) = [r for changes, r in levers if changes.get("optimizer.name") == "sgd"]
    assert sgd.optimizer.implementation == "foreach"  # torch cannot update shards with fused sgd


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ({"pp": 2}, {}), ({"pp": 2, "dp_shard": 2}, {}), ({"tp": 2}, {"lean": "auto"}),
        ({"cp": 2}, {}), ({"dp_shard": 2}, {"offload": "parameters"}),
    ],
    ids=str,
)  # fmt: skip
def test_levers_of_a_mesh_are_what_its_ranks_can_run(mesh, others):
    ranks = Parallel(**mesh).world
    task = {"sequence_length": 64, "global_batch": 16, "packing": False}
    request = ask(
        hardware={"device": "h100-sxm", "count": ranks}, attention="flash", micro_batch=2,
        precision="bf16-mixed", recompute="none", parallel=mesh, task=task, **others,
    )  # fmt: skip
    levers = list(turn(read_problem(request), read_stated(request).recipe))
    assert levers
    for lever in levers:
        check_ranks(lever.recipe)
        check_offload(lever.recipe, cpu=False)
