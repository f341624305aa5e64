"""The search of memfit's own step: what it decides, refuses and prefers."""

from bisect import bisect_left
from pathlib import Path

import msgspec
import pytest

from memfit import api
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.core.units import MIB
from memfit.plan.memory.verdict import needs
from memfit.plan.request.meshes import divisors
from memfit.plan.request.problem import list_chunks, read_problem
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.explained import describe
from memfit.plan.search.search import predict, search, search_briefly
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request

RECIPES = Path(__file__).parent.parent.parent / "recipes"
MODEL = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def ask(**changes):
    data = {
        "model": MODEL,
        "method": "full",
        "precision": "fp32",
        "task": {"sequence_length": 512, "global_batch": 8, "steps": 10},
        "hardware": {"device": "cpu"},
        **changes,
    }
    return from_data(data, Request, source="the test")


def everything(request):
    """Every recipe of the exact knobs, by brute force."""
    problem = read_problem(request)
    start = Candidate.of(problem, search(problem).recipe)
    for micro in divisors(8):
        for chunk in (0, *list_chunks(micro * 512, adapted=False)):
            for full, part in [(f, s) for f in range(5) for s in range(5 - f)]:
                yield start.but(
                    micro_batch=micro,
                    accumulation=8 // micro,
                    loss="chunked" if chunk else "plain",
                    loss_chunk=chunk,
                    recompute_blocks=full,
                    selective_blocks=part,
                )


@pytest.mark.usefixtures("tensors_alone")
@pytest.mark.parametrize("limit", [40, 60, 90, 150, 300, 1000])
def test_the_plan_is_the_fastest_recipe_that_fits(limit):
    request = ask(limits={"memory": f"{limit} MiB"})
    chosen = search(read_problem(request))
    fitting = [c for c in everything(request) if c.fits]
    if not fitting:
        assert chosen.memory.verdict == "does_not_fit"
        return
    assert chosen.memory.verdict == "fits"
    best = min(c.seconds for c in fitting)
    mine = Candidate.of(read_problem(request), chosen.recipe).seconds
    assert mine == pytest.approx(best, rel=1e-12)


@pytest.mark.usefixtures("tensors_alone")
def test_a_looser_limit_never_makes_the_plan_slower():
    times = []
    for limit in range(60, 400, 20):
        problem = read_problem(ask(limits={"memory": f"{limit} MiB"}))
        times.append(Candidate.of(problem, search(problem).recipe).seconds)
    assert times == sorted(times, reverse=True)
    assert len(set(times)) > 3


@pytest.mark.usefixtures("tensors_alone")
def test_an_impossible_limit_returns_the_nearest_miss_and_what_it_lacks():
    request = ask(limits={"memory": "10 MiB"})
    chosen = search(read_problem(request))
    assert chosen.memory.verdict == "does_not_fit"
    assert needs(chosen.memory) == min(c.needs for c in everything(request))
    assert needs(chosen.memory) > 10 * MIB
    assert "more than there is" in chosen.considered[-1].because


TENTH = [
    pytest.param("llama-3.2-1b", "h100-sxm", 1.03, marks=[pytest.mark.slow, pytest.mark.wide]),
    ("gpt2-medium", "rtx-4090", 1.05),
]


@pytest.mark.usefixtures("certified_here")
@pytest.mark.parametrize(("model", "device", "slower"), TENTH)
def test_a_limit_a_tenth_below_none_costs_a_few_per_cent(model, device, slower):
    """Whole blocks alone cost several times that; the certificate says the same bytes."""
    stated = {
        "method": "full", "precision": "bf16-mixed", "micro_batch": 8, "loss": "chunked",
        "loss_chunk": 1024, "task.sequence_length": 1024, "recompute": "none", "lean": "none",
        "limits.tight": True,
    }  # fmt: skip
    none = api.plan(api.read(model, device=device, changes=stated), levers=False)
    bare = none.memory.device_total - none.memory.peak_allocated  # what no recipe changes
    limit = bare + int(none.memory.peak_allocated * 0.9)
    open_ = stated | {"recompute": "auto", "limits.memory": f"{limit} B"}
    chosen = api.plan(api.read(model, device=device, changes=open_), levers=False)
    assert chosen.memory.verdict in ("fits", "at_risk")
    assert chosen.memory.peak_allocated <= 0.91 * none.memory.peak_allocated
    assert chosen.time.step_seconds < slower * none.time.step_seconds
    assert chosen.recipe.selective_blocks
    blocks = range(1, none.recipe.model.config.get("n_layer", 16) + 1)
    fewest = bisect_left(blocks, True, key=lambda n: bool(_with_blocks(model, device, open_, n)))
    assert fewest < len(blocks)  # each block more takes longer, and less memory
    whole = _with_blocks(model, device, open_, blocks[fewest])
    assert chosen.time.step_seconds < whole.time.step_seconds
    certified = api.certify(chosen.recipe).ledger.total(Phase.BACKWARD)
    assert chosen.ledger.total(Phase.BACKWARD) - _rounding(chosen) == pytest.approx(
        certified, rel=1e-3
    )


def _with_blocks(model, device, changes, blocks):
    """The plan that recomputes so many whole blocks; None where it does not fit, or has fewer."""
    try:
        changes = changes | {"recompute": {"blocks": blocks}}
        plan = api.plan(api.read(model, device=device, changes=changes), levers=False)
    except InvalidRequest:
        return None
    return plan if plan.memory.verdict == "fits" else None


def _rounding(plan):
    return plan.ledger.by_kind(Phase.BACKWARD).get(Kind.FRAGMENTATION, 0)


@pytest.mark.levers
@pytest.mark.usefixtures("tensors_alone")
def test_precision_is_given_up_only_when_nothing_else_fits():
    roomy = api.plan(ask(precision="auto", limits={"memory": "1 GiB"}))
    assert roomy.recipe.precision == "fp32"
    assert any(lever.relative_time < 1 and lever.fits for lever in roomy.levers)
    full = ask(precision="auto", limits={"memory": "10 MiB"})
    smallest = min((c.needs for c in everything(ask(limits={"memory": "10 MiB"}))), default=0)
    tight = api.plan(
        msgspec.structs.replace(
            full, limits=msgspec.structs.replace(full.limits, memory=f"{smallest - 1} B")
        )
    )
    assert tight.recipe.precision != "fp32"


def test_what_the_request_states_is_kept():
    request = ask(
        micro_batch=2, recompute={"blocks": 3}, loss="chunked", loss_chunk=128,
        optimizer={"name": "sgd", "implementation": "foreach", "learning_rate": 0.5},
    )  # fmt: skip
    recipe = api.plan(request, levers=False).recipe
    assert (recipe.micro_batch, recipe.accumulation) == (2, 4)
    assert recipe.recompute_blocks == 3
    assert (recipe.loss, recipe.loss_chunk) == ("chunked", 128)
    assert (recipe.optimizer.name, recipe.optimizer.implementation) == ("sgd", "foreach")
    assert recipe.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("model", "length", "key"),
    [
        ("llama-3.1-8b", 262144, "`rope_scaling: {rope_type: yarn, factor: 2, original_max_posit"),
        ("bloom-560m", 4096, "its bias by distance goes on"), ("phi-3-mini-4k", 8192, "longrope"),
    ],
)  # fmt: skip
def test_rows_past_what_a_model_was_trained_on_are_planned_with_a_note(model, length, key):
    """Positions that are computed have no last one; the plan says what extends them."""
    task = {"sequence_length": length, "global_batch": 1, "packing": False}
    stated = {"model": model, "task": task, "hardware": {"device": "b300-sxm"}}
    plan = search(read_problem(from_data(stated, Request, source="a test")), levers=False)
    assert plan.recipe.sequence_length == length
    (note,) = [said for said in plan.assumptions if "was trained on at most" in said]
    assert f"rows of {length:,} tokens" in note
    assert key in note
    usual = {**stated, "task": {**task, "sequence_length": 1024}}
    plan = search(read_problem(from_data(usual, Request, source="a test")), levers=False)
    assert not [said for said in plan.assumptions if "was trained on" in said]


def test_predict_refuses_what_is_left_open():
    with pytest.raises(InvalidRequest, match="recompute, loss, micro_batch is left on `auto`"):
        predict(read_problem(ask()))
    stated = ask(recompute="full", loss="plain", micro_batch=4)
    plan = predict(read_problem(stated))
    assert describe(plan.recipe, 4) == "full fp32, micro-batch 4, recompute full, loss plain"
    weighed = predict(read_problem(stated), levers=True)
    assert weighed.levers
    assert msgspec.structs.replace(weighed, levers=()) == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "gpt2", "weights": "random", "task": {"sequence_length": 2048}},
            "`task.sequence_length: 2048` is longer than the 1024 positions of `gpt2`",
        ),
        ({"micro_batch": 3}, "`micro_batch: 3` does not divide `task.global_batch: 8`"),
        ({"recompute": {"blocks": 9}}, "`recompute.blocks: 9` is more than the 4 blocks"),
        ({"base_format": "bf16"}, "`precision: fp32` casts nothing, but `base_format: bf16`"),
        ({"attention": "efficient"}, "`attention: efficient` exists on CUDA only"),
        ({"method": "freeze"}, "`method: freeze` does not say what stays trainable"),
        ({"weights": "pretrained"}, "`weights: pretrained`, but `model` is only a configuration"),
        (
            {"method": "lora", "lora": {"targets": ["q_porj"]}},
            "q_porj",
        ),
        ({"model": {"hidden_size": 3}}, "no `model_type` in request"),
    ],
)
def test_what_cannot_run_is_refused_with_both_values(changes, message):
    with pytest.raises(InvalidRequest) as caught:
        api.plan(ask(**changes), levers=False)
    assert message in caught.value.message
    assert caught.value.hint


WHOLE = {"loss": "chunked", "micro_batch": 1, "precision": "bf16"}
TASK = {"sequence_length": 512, "global_batch": 8, "steps": 10}


@pytest.mark.parametrize(
    ("stated", "chunk"),
    [
        pytest.param({}, 512, id="a trained head's gradient is one product"),
        pytest.param({"method": "lora"}, 256, id="a frozen head has none"),
        pytest.param({"task": TASK | {"sequence_length": 128}}, 256, id="one chunk already"),
        pytest.param({"task": TASK | {"sequence_length": 513}}, 256, id="three chunks or more"),
        pytest.param({"loss_chunk": 128}, 128, id="stated"),
    ],
)
def test_two_small_chunks_are_one_where_the_head_is_trained(stated, chunk):
    request = ask(**WHOLE | {"task": TASK} | stated)
    assert search(read_problem(request)).recipe.loss_chunk == chunk


def test_unknown_names_offer_the_nearest():
    with pytest.raises(UnknownName) as caught:
        api.plan(api.read("llama-3.1-8c", device="h100-sxm"), levers=False)
    assert "`llama-3.1-8b`" in caught.value.hint
    with pytest.raises(UnknownName) as caught:
        api.plan(api.read("llama-3.1-8b", device="h100-sxn"), levers=False)
    assert "`h100-sxm`" in caught.value.hint
    with pytest.raises(UnknownName):
        api.plan(ask(optimizer={"name": "adamv"}), levers=False)


def test_four_limits_give_the_demos_model_four_recipes():
    digests = set()
    for limit in ("0.75 GiB", "1 GiB", "1.5 GiB", "2.5 GiB"):
        changes = {
            "limits.memory": limit, "task.global_batch": 64, "task.data": "", "task.evaluation": ""
        }  # fmt: skip
        plan = api.plan(
            api.read(RECIPES / "demo-llama_full_cpu.yaml", changes=changes), levers=False
        )
        memory = plan.memory
        assert memory.verdict == "fits"
        assert memory.usable / 2 < memory.total_high <= memory.usable
        assert memory.total_low < memory.device_total < memory.total_high
        digests.add(plan.recipe_digest)
    assert len(digests) == 4


def test_a_limit_that_no_process_keeps_is_refused_with_what_it_takes():
    """What is imported alone is more; no recipe changes that."""
    plan = api.plan(ask(limits={"memory": "150 MiB"}), levers=False)
    assert plan.memory.verdict == "does_not_fit"
    (entry,) = [e for e in plan.memory.entries if e.owner == "process"]
    assert "imported libraries" in entry.because
    assert sum(e.nbytes for e in plan.memory.entries) == plan.memory.device_total


def test_a_lever_is_shown_with_what_it_changes_at_the_peak_alone():
    """fused keeps a count of steps for each tensor on the device, 512 bytes; foreach does not."""
    chosen = api.plan(
        api.read("llama-3.1-8b", device="rtx-4090", changes={"method": "lora"}), levers=False
    )
    plan = api.predict_with_levers(api.state(chosen))
    (foreach,) = [c for c in plan.levers if c.changes == {"optimizer.implementation": "foreach"}]
    adapters = 32 * 2 * 2  # A and B of two projections of each block
    assert plan.memory.peak_allocated - foreach.peak_allocated == adapters * 512


def test_the_smallest_is_tried_where_no_estimate_says_that_anything_fits(monkeypatch):
    """But for what is too large by what is always there, which no prediction makes smaller."""
    monkeypatch.setattr(Candidate, "likely", property(lambda _: False))
    monkeypatch.setattr(Candidate, "may_fit", lambda *_: False)
    asked = []
    hopeless = Candidate.is_hopeless.fget
    monkeypatch.setattr(
        Candidate, "is_hopeless", property(lambda own: asked.append(own) or hopeless(own))
    )
    verdicts = {}
    for memory in ("16 GiB", "1 GiB"):
        changes = {"method": "full", "limits.memory": memory}
        problem = read_problem(api.read("smollm2-135m", device="h100-sxm", changes=changes))
        asked.clear()
        verdicts[memory] = search_briefly(problem).plan.memory.verdict
        assert asked
        assert not any(own.fits for own in asked if hopeless(own))
    assert verdicts == {"16 GiB": "fits", "1 GiB": "does_not_fit"}
