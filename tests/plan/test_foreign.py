"""Requests for another framework's step: what is stated, what is taken, what is refused."""

import msgspec
import pytest

from memfit import api
from memfit.core.errors import InvalidRequest, MemoryUnknown, UnknownName
from memfit.core.units import GIB
from memfit.plan.frameworks import Knob, find_framework, frameworks, make_ledger, resolve_options
from memfit.plan.memory.declared import describe_ledger, predict_ledger
from memfit.plan.memory.verdict import needs
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import OWN_AXES, OWN_VALUES, Parallel
from memfit.records.request import Request
from memfit.screens.plan import show_plan
from memfit.screens.widgets.terminal import Console

TITAN = {
    "model": "llama-3.1-8b", "framework": "torchtitan", "micro_batch": 2, "recompute": "selective",
    "task": {"sequence_length": 8192, "global_batch": 16}, "parallel": {"dp_shard": 8},
    "hardware": {"device": "h100-sxm", "count": 8},
}  # fmt: skip


def ask(**changes):
    return from_data(TITAN | changes, Request, source="the test")


def test_a_framework_is_predicted_on_its_fullest_rank_with_the_time_of_its_step():
    plan = api.predict(ask())
    assert plan.recipe.framework == "torchtitan"
    assert plan.recipe.parallel.world == 8
    assert plan.recipe.recompute == "selective"
    peak = plan.ledger.at(plan.ledger.peak_phase)
    kept = sum(e.nbytes for e in peak if e.kind is not Kind.FRAGMENTATION)
    assert plan.memory.peak_allocated == kept
    assert plan.memory.peak_allocated < plan.memory.peak_reserved < plan.memory.device_total
    assert plan.time.step_seconds == pytest.approx(plan.timeline.seconds)
    assert plan.time.tokens_per_second == pytest.approx(16 * 8192 / plan.time.step_seconds)
    assert 0.2 < plan.time.mfu < plan.time.hfu < 0.7
    assert "`torchtitan` as fitted on" in plan.time.because
    assert plan.cost.device_hours == pytest.approx(8 * plan.time.total_seconds / 3600)
    assert plan.considered == plan.levers == ()


def test_a_time_that_rests_on_what_nobody_stated_is_unknown():
    several = {"device": "rtx-4090", "count": 8, "nodes": 2}  # no usual network between machines
    task = {"sequence_length": 8192, "global_batch": 32}
    plan = api.predict(ask(hardware=several, parallel={"dp_shard": 16}, task=task))
    assert plan.time.step_seconds is None
    assert plan.timeline.spans == ()
    assert "what joins 2 machines of `rtx-4090` is unknown" in plan.time.because


MEGATRON = TITAN | {
    "framework": "megatron", "recompute": "none", "precision": "fp8-mixed",
    "hardware": {"device": "b200-sxm", "count": 4, "nodes": 2},
    "parallel": {"dp_shard": 8, "zero": 1},
}  # fmt: skip


def test_a_step_whose_bytes_are_not_described_has_no_memory_figure_and_says_why(capsys):
    known = api.predict(from_data(MEGATRON, Request, source="the test"))
    assert known.memory.verdict != "unproven"
    asked = MEGATRON | {"options": {"fp8_recipe": "mxfp8"}}
    plan = api.predict(from_data(asked, Request, source="the test"))
    memory = plan.memory
    assert (memory.peak_allocated, memory.peak_reserved, memory.device_total) == (None, None, None)
    assert memory.verdict == "unproven"
    assert "`options.fp8_recipe: mxfp8`" in memory.because
    assert plan.ledger.entries == ()
    with pytest.raises(MemoryUnknown):
        needs(memory)
    show_plan(Console(width=100, colour=False), plan, commands=())
    shown = " ".join(capsys.readouterr().out.split())
    assert "memory unknown: llama-3.1-8b on 8 x b200-sxm" in shown
    assert "`options.fp8_recipe: mxfp8`" in shown


def test_a_recipe_says_how_many_devices_a_machine_has_and_older_recipes_keep_their_names():
    two = api.predict(from_data(MEGATRON, Request, source="the test")).recipe
    hardware = {"device": "b200-sxm", "count": 8}
    one = api.predict(from_data(MEGATRON | {"hardware": hardware}, Request, source="t")).recipe
    assert (two.devices_per_node, one.devices_per_node) == (4, 0)
    assert two.digest != one.digest
    assert one.digest == "4197dfc1868fd9f8"  # as before there were such keys


def test_what_is_left_open_takes_the_frameworks_default_and_is_said():
    plan = api.predict(ask())
    assert "precision bf16-mixed (torchtitan's default)" in plan.assumptions
    assert not [line for line in plan.assumptions if line.startswith("recompute")]
    stated = api.predict(ask(precision="bf16-mixed"))
    assert not [line for line in stated.assumptions if line.startswith("precision")]
    assert stated.recipe == plan.recipe


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"framework": "torchtitn"}, UnknownName, "did you mean `torchtitan`"),
        ({"attention": "eager"}, InvalidRequest, "described: flash"),
        ({"parallel": {"dp_shard": 8, "ep": 2}}, InvalidRequest, "`parallel.ep: 2`"),
        ({"parallel": {"dp_shard": 4}}, InvalidRequest, "names 4 ranks, but `hardware` has 8"),
        ({"micro_batch": 3}, InvalidRequest, "is not a multiple of 24"),
        ({"options": {"nonsense": 1}}, InvalidRequest, "`options.nonsense` is no knob"),
        ({"parallel": {"pp": 64}, "hardware": {"device": "h100-sxm", "count": 64}},
         InvalidRequest, "more than the 32 blocks"),
    ],
)  # fmt: skip
def test_what_the_framework_does_not_have_is_refused_with_both_values(changes, error, said):
    with pytest.raises(error) as raised:
        api.predict(ask(**changes))
    assert said in f"{raised.value}\n{raised.value.hint}"


@pytest.mark.parametrize("verb", ["read_unplanned", "refuse_ranks"])
def test_no_other_verb_takes_another_frameworks_step(verb):
    with pytest.raises(InvalidRequest, match="can plan and predict but neither certify"):
        getattr(api, verb)(ask())


def test_a_recipe_of_another_framework_cannot_be_built():
    from memfit.train.step.build import build_model

    recipe = api.predict(ask()).recipe
    with pytest.raises(InvalidRequest, match="`framework: torchtitan`"):
        build_model(recipe, "meta")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_format": "int4"}, "`base_format: int4` is not in memfit's own step"),
        ({"compile": "model"}, "`compile: model`"),
        ({"options": {"a": 1}}, "no `options`"),
        ({"parallel": {"zero": 2}}, "`parallel.zero: 2`"),
    ],
)
def test_memfits_own_step_refuses_what_only_others_have(changes, said):
    with pytest.raises(InvalidRequest) as raised:
        from_data({"model": "llama-3.1-8b", **changes}, Request, source="the test")
    assert said in str(raised.value)


def test_the_verdict_sees_both_ends_of_the_bands():
    recipe, model, _ = read_defaults(ask())
    device = find_device("h100-sxm")
    ledger = predict_ledger(recipe, model, device)
    slack = find_framework("torchtitan").slack

    def verdict(usable):
        return describe_ledger(ledger, recipe, device, usable).verdict

    assert verdict(round(ledger.peak * slack.low)) == "does_not_fit"
    assert verdict(round(ledger.peak * slack.high) + 40 * GIB) == "fits"
    assert verdict(round(ledger.peak * slack.typical) + 2 * GIB) == "at_risk"
    assert verdict(None) == "unproven"


def test_options_are_read_like_their_defaults():
    framework = find_framework("megatron")
    known = resolve_options(framework, {})
    assert known == {name: knob.default for name, knob in framework.knobs.items()}
    flag = next(n for n, k in framework.knobs.items() if k.default is False)
    count = next(n for n, k in framework.knobs.items() if type(k.default) is int and not k.values)
    among = next(n for n, k in framework.knobs.items() if k.values)
    for name, value in ((flag, 1), (count, True), (count, "many"), (among, "nobody's")):
        with pytest.raises(InvalidRequest, match=f"options.{name}"):
            resolve_options(framework, {name: value})


@pytest.mark.parametrize("name", frameworks.names())
def test_every_framework_declares_all_knobs_in_the_requests_words(name):
    framework = find_framework(name)
    assert framework.name == name
    wanted = {"method", "base_format", "optimizer", "implementation", *OWN_VALUES}
    assert set(framework.values) == wanted
    for key, values in framework.values.items():
        assert values, key
        for value in values:
            changes = {key: value} if key not in ("optimizer", "implementation") else {}
            from_data(TITAN | {"framework": name} | changes, Request, source="the test")
    assert set(framework.axes) <= set(Parallel.__struct_fields__)
    assert 0 < framework.slack.low <= framework.slack.typical <= framework.slack.high
    assert framework.slack.source
    assert framework.source
    assert all(isinstance(knob, Knob) and knob.means for knob in framework.knobs.values())


def test_a_ledger_of_instants_leaves_out_what_is_not_there():
    ledger = make_ledger(
        {
            Phase.LOSS: {(Kind.LOGITS, "loss"): (7, "seven"), (Kind.INPUT, "batch"): (0, "none")},
            Phase.FORWARD: {(Kind.PARAMETERS, "blocks"): (3, "three")},
        }
    )
    assert [e.phase for e in ledger.entries] == [Phase.FORWARD, Phase.LOSS]
    assert ledger.peak == 7


def test_own_axes_are_fields_of_the_mesh():
    assert set(OWN_AXES) <= set(msgspec.structs.asdict(Parallel()))
