"""Requests of sampled answers: defaults, refusals, and what no plan claims of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.catalog import find_device
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.families import read_model
from memfit.plan.request.wording import restate
from memfit.records import from_data, to_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel, Preference
from memfit.records.reinforcement import (
    Policy,
    RewardAdapter,
    RewardSettings,
    Rollout,
    ValueSettings,
)
from memfit.records.request import Request, change
from memfit.train.measure.counters import measure
from memfit.train.step.build import build_model
from reward_adapters import write_adapter
from tiny_models import CONFIGS, make_recipe

DEFAULTS = """
import json
from trl import GRPOConfig, RLOOConfig
from trl.experimental.online_dpo import OnlineDPOConfig
print(json.dumps({
    name: {k: v for k, v in vars(config(output_dir="x", bf16=False, use_cpu=True)).items()
           if isinstance(v, (int, float, str, type(None)))}
    for name, config in (
        ("grpo", GRPOConfig), ("rloo", RLOOConfig), ("online_dpo", OnlineDPOConfig)
    )
}))
"""
# what it prints of the keys that recipes have, too; None: no token is left out, nothing is capped
SHARED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
GROUPED = {
    **SHARED, "max_completion_length": 512, "mask_truncated_completions": False,
    "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None,
}  # fmt: skip
TRLS = {
    "grpo": {
        **GROUPED, "num_generations": 8, "beta": 0.0, "loss_type": "dapo", "delta": None,
        "scale_rewards": "group", "importance_sampling_level": "token",
        "use_bias_correction_kl": True,
    },
    "rloo": {**GROUPED, "num_generations": 2, "beta": 0.05, "normalize_advantages": False},
    "online_dpo": {
        **SHARED, "temperature": 0.9, "beta": 0.1, "loss_type": "sigmoid",
        "missing_eos_penalty": None,
    },
}  # fmt: skip
ROLLOUT = {"max_prompt_length": 16, "max_completion_length": 16}
DEEP = {
    **CONFIGS["llama"], "num_hidden_layers": 12, "head_dim": 64, "max_position_embeddings": 65536,
}  # fmt: skip


def ask(objective="grpo", **changes):
    data = {
        "model": CONFIGS["llama"], "hardware": {"device": "h100-sxm"}, "rollout": ROLLOUT,
        "reward": {"funcs": ["number"]}, **changes,
    }  # fmt: skip
    data["task"] = {"objective": objective, "steps": 3, **changes.get("task", {})}
    return from_data(data, Request, source="here")


def plan(request):
    return api.plan(request, levers=False)


def test_what_is_left_open_is_what_trl_takes():
    """TRL 1.16's configurations; beta of a whole model is 0, as there is no reference."""
    grpo = plan(ask(method="lora")).recipe
    assert grpo.rollout == Rollout(num_generations=8, **ROLLOUT)
    assert grpo.policy == Policy(loss_type="dapo", beta=0.0, epsilon=0.2, epsilon_high=0.2)
    assert grpo.reward == RewardSettings(funcs=("number",))
    assert (grpo.sequence_length, grpo.packing) == (32, False)
    rloo = plan(ask("rloo", method="lora"))
    assert (rloo.recipe.rollout.num_generations, rloo.recipe.policy.beta) == (2, 0.05)
    assert plan(ask("rloo", method="full")).recipe.policy.beta == 0.0
    assert "beta 0 (what is trained whole has no reference unless one is stated)" in str(
        plan(ask("rloo", method="full")).assumptions
    )
    plain = plan(ask(rollout={}, task={"sequence_length": 64 * 12}, model="qwen2.5-0.5b")).recipe
    assert (plain.rollout.max_prompt_length, plain.rollout.max_completion_length) == (256, 512)
    assert plan(ask(rollout={}, model="qwen2.5-0.5b")).recipe.sequence_length == 1024


def test_ppo_takes_what_trl_s_ppo_config_takes():
    """1.12's, the last version with it: four updates, one answer to a prompt, the KL a penalty."""
    made = plan(ask("ppo"))
    recipe = made.recipe
    assert (recipe.method, recipe.rollout.num_generations) == ("lora", 1)
    said = str(made.assumptions)
    assert f"{recipe.global_batch} prompts with 1 answer each" in said
    assert "prompts with 8 answers each" in str(plan(ask()).assumptions)
    assert recipe.policy == Policy(beta=0.05, num_iterations=4)
    assert recipe.value == ValueSettings()
    assert to_data(recipe.value) == {
        "gamma": 1.0, "lam": 0.95, "cliprange_value": 0.2, "vf_coef": 0.1,
        "whiten_rewards": False,
    }  # fmt: skip
    assert recipe.rollout.temperature == 0.7
    stated = {
        "num_ppo_epochs": 2, "kl_coef": 0.0, "cliprange": 0.3, "cliprange_value": 0.1,
        "vf_coef": 0.5, "gamma": 0.9, "lam": 0.8, "whiten_rewards": True,
    }  # fmt: skip
    other = plan(ask("ppo", ppo=stated)).recipe
    assert other.policy == Policy(beta=0.0, epsilon=0.3, epsilon_high=0.3, num_iterations=2)
    assert other.value == ValueSettings(
        gamma=0.9, lam=0.8, cliprange_value=0.1, vf_coef=0.5, whiten_rewards=True,
    )  # fmt: skip
    for name, value in stated.items():
        alone = plan(ask("ppo", ppo={name: value})).recipe
        assert alone.digest != recipe.digest, name
        assert alone.course != recipe.course, name
    assert "the value is a second adapter" in str(made.assumptions)


@pytest.mark.parametrize("method", ["full", "freeze"])
def test_ppo_of_all_weights_has_a_value_model_and_says_so(method):
    """Three times the weights, twice the gradients and states, and longer updates."""
    freeze = {"last_blocks": 2} if method == "freeze" else {}
    made = plan(ask("ppo", method=method, freeze=freeze, micro_batch=1))
    alone = plan(ask("grpo", method=method, freeze=freeze, micro_batch=1))
    assert made.recipe.method == method
    assert "the value is a second copy of the trained weights" in str(made.assumptions)
    assert "the reference is a frozen copy" in str(made.assumptions)
    parameters, states = (
        [held.ledger.by_kind(Phase.OPTIMIZER_STEP)[kind] for held in (made, alone)]
        for kind in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE)
    )
    head = sum(w.nbytes for w in read_model(made.recipe.model).weights if w.part == "head")
    own = states[1] - 2 * head  # AdamW's two numbers in fp32, of each weight
    assert states[0] - states[1] == pytest.approx(own, rel=5e-3)
    assert parameters[0] - parameters[1] == pytest.approx(states[1] / 2 + own / 2, rel=5e-3)
    owners = {e.owner: e.because for e in made.ledger.at(Phase.FORWARD)}
    assert "trained beside the policy" in owners["value"]


@pytest.mark.parametrize(
    ("objective", "changes", "says"),
    [
        ("ppo", {"method": "dora"}, "use `method: lora`, or `full`"),
        ("ppo", {"policy": {"beta": 0.1}}, "write `ppo.kl_coef`"),
        ("ppo", {"policy": {"num_iterations": 2}}, "write `ppo.num_ppo_epochs`"),
        ("ppo", {"policy": {"loss_type": "grpo"}}, "it has no `loss_type`"),
        ("grpo", {"ppo": {"kl_coef": 0.1}}, "write `policy.beta`"),
        ("grpo", {"ppo": {"lam": 0.5}}, "it is of `objective: ppo`"),
        ("sft", {"ppo": {"lam": 0.5}, "rollout": {}, "reward": {}}, "it is of `objective: ppo`"),
        ("ppo", {"ppo": {"lam": 1.5}}, "lam"),
        ("ppo", {"rollout": {"dynamic_sampling": 1}}, "compares no answers of a group"),
    ],
)
def test_a_request_of_ppo_that_cannot_be_is_refused(objective, changes, says):
    with pytest.raises(InvalidRequest) as error:
        plan(ask(objective, **changes))
    assert says in f"{error.value.message} {error.value.hint}"


def test_a_value_that_nothing_learns_is_not_built():
    recipe = replace(plan(ask("ppo", micro_batch=4)).recipe, method="dora")
    with pytest.raises(InvalidRequest, match="whose adapters stand once on a base"):
        build_model(recipe, "meta")


def test_what_a_request_says_of_sampling_is_the_recipe_s():
    narrow = {
        "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "stop_words": ("</answer>", "\n\n"),
    }  # fmt: skip
    made = plan(ask(rollout=ROLLOUT | narrow))
    assert made.recipe.rollout == Rollout(num_generations=8, **ROLLOUT, **narrow)
    assert "the loss computes with the chances before top-k" in str(made.assumptions)
    assert made.recipe.digest != plan(ask()).recipe.digest
    assert plan(restate(made)).recipe.rollout == made.recipe.rollout
    for wrong in ({"top_p": 1.5}, {"min_p": -0.1}, {"top_k": -1}, {"repetition_penalty": 0}):
        with pytest.raises(InvalidRequest, match=rf"rollout\.{next(iter(wrong))}"):
            ask(rollout=ROLLOUT | wrong)


@pytest.mark.parametrize(
    ("filters", "sorts"),
    [
        ({"top_p": 0.9}, True), ({"top_p": 0.9, "top_k": 20}, False), ({"top_k": 20}, False),
        ({"top_k": 5000}, True), ({"repetition_penalty": 1.2, "min_p": 0.1}, False), ({}, False),
    ],
)  # fmt: skip
def test_a_sort_of_the_vocabulary_is_a_risk_on_a_gpu(filters, sorts):
    made = plan(ask(rollout=ROLLOUT | filters))
    assert made.memory.verdict == ("at_risk" if sorts else "fits")
    assert ("sort of the vocabulary" in made.memory.because) == sorts


@pytest.mark.parametrize("objective", TRLS)
def test_what_is_not_said_of_sampling_is_trl_s_default(objective):
    theirs = TRLS[objective]
    recipe = plan(ask(objective, method="lora", model="qwen2.5-0.5b", rollout={})).recipe
    for group in (recipe.rollout, recipe.policy):
        for name in {*to_data(group)} & {*theirs} - {"epsilon_high", "delta", "min_p"}:
            assert getattr(group, name) == theirs[name], name


@pytest.mark.slow
@pytest.mark.wide  # tests/export/test_neighbour_parsers.py runs TRL's code, too
def test_these_are_trl_s_defaults(tmp_path):
    """Beside its own configurations, which `make neighbours` installs."""
    python = Path(sys.prefix) / "neighbours" / "trainers" / "bin" / "python"
    if not python.exists():
        pytest.skip("`make neighbours` installs TRL")
    done = subprocess.run(
        [str(python), "-c", DEFAULTS], capture_output=True, text=True, check=True,
        env={**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    for objective, theirs in json.loads(done.stdout.splitlines()[-1]).items():
        asked = ask(objective, method="lora", model="qwen2.5-0.5b", rollout={})
        recipe = plan(asked).recipe
        named = {*to_data(recipe.rollout), *to_data(recipe.policy), *TRLS[objective]}
        assert {name: theirs[name] for name in named & {*theirs}} == TRLS[objective]


def test_a_batch_that_is_left_open_holds_whole_groups():
    assert ask(rollout={"num_generations": 6}).global_batch == 18
    assert ask(rollout={"num_generations": 6}, micro_batch=4).global_batch == 24
    assert ask().global_batch == 16


@pytest.mark.parametrize("objective", ["grpo", "rloo", "ppo"])
def test_a_plan_of_sampled_answers_has_a_verdict_over_all_phases(objective):
    made = plan(ask(objective))
    assert made.memory.verdict == "fits"
    assert made.recipe.allocator == "expandable_segments:True"
    assert any("expandable_segments:True (answers of many" in line for line in made.assumptions)
    phases = [str(phase) for phase in made.ledger.phases]
    assert phases[:3] == ["load", "prefill", "decode"]
    assert api.predict(restate(made)).memory.verdict == "fits"
    whole = plan(ask(objective, allocator="expandable_segments:False"))
    assert not any("expandable_segments" in line for line in whole.assumptions)
    assert whole.memory.verdict == "at_risk"
    assert "expandable_segments:True` leaves little" in whole.memory.because
    assert (
        plan(ask(objective, hardware={"device": "cpu"}, limits={"memory": "2 GiB"})).memory.verdict
        == "fits"
    )


def test_slots_decide_where_answers_are_long_and_many():
    """By hand: a slot holds 2 x 12 layers x 2 heads x 64 elements of fp32 a token."""
    many = ask(
        model=DEEP, precision="fp32",
        rollout={"max_prompt_length": 16, "max_completion_length": 2000, "num_generations": 64},
        task={"global_batch": 64}, micro_batch=1,
    )  # fmt: skip
    made = plan(many)
    slots = 2 * 12 * 2 * 64 * 4 * (64 * 2016 + 16)
    held = {e.kind: e.nbytes for e in made.ledger.at(made.ledger.peak_phase)}
    assert made.ledger.peak_phase in ("prefill", "decode")
    assert held["kv_cache"] == slots
    few = plan(restate_rows(many, 4))
    assert few.ledger.peak < made.ledger.peak - slots * 0.8


def test_answers_of_linear_attention_are_planned_on_one_card():
    """By hand: of 24 layers 32 heads of 128 x 128 fp32, and 4 columns of 8,192 channels in bf16; of
    8 layers keys and values of 4 heads of 256."""
    asked = ask(
        model="qwen3.5-9b", method="lora", base_format="nf4", precision="bf16-mixed",
        hardware={"device": "rtx-4090"}, micro_batch=1, recompute="full", task={"global_batch": 8},
        rollout={"num_generations": 8, "max_prompt_length": 64, "max_completion_length": 64},
    )  # fmt: skip
    made = plan(asked)
    assert made.memory.verdict == "fits"
    states = 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    token = 8 * 2 * 4 * 256 * 2
    held = {e.kind: e for e in made.ledger.at(Phase.DECODE)}
    # each tensor in blocks of 512 B, which all of them fill
    assert held["kv_cache"].nbytes == (8 + 1) * states + (8 * 128 + 64) * token
    assert "of states each in 24 layers" in held["kv_cache"].because


def restate_rows(request, rows):
    return replace(request, rollout=replace(request.rollout, rows=rows))


def test_an_update_that_does_not_fit_is_refuted_all_the_same():
    assert plan(ask(limits={"memory": "600 MiB"}, model="gpt2-xl")).memory.verdict == (
        "does_not_fit"
    )


@pytest.mark.ways_out
def test_a_plan_that_does_not_fit_offers_what_a_rollout_can_do_without():
    asked = ask(
        limits={"memory": "900 MiB"}, hardware={"device": "cpu"}, micro_batch=1, method="full",
        model=DEEP,
        rollout={
            "max_prompt_length": 16, "max_completion_length": 2000, "num_generations": 64,
            "rows": 64,
        },
        task={"global_batch": 64},
    )  # fmt: skip
    made = api.plan(asked)
    assert made.memory.verdict == "does_not_fit"
    ways = {key: way for way in made.ways_out for key in way.changes}
    assert {"rollout.rows", "rollout.max_completion_length"} <= set(ways)
    assert ways["rollout.rows"].exact
    assert not ways["rollout.max_completion_length"].exact
    for way in (ways["rollout.rows"], ways["rollout.max_completion_length"]):
        assert plan(change(asked, way.changes)).memory.verdict == "fits"


def test_as_many_answers_are_in_flight_as_the_device_holds():
    """The most of all, a half, a quarter, ... that fit; an answer is the same beside any others."""
    asked = ask(
        limits={"memory": "900 MiB"}, hardware={"device": "cpu"}, micro_batch=1, method="full",
        model=DEEP, precision="fp32",
        rollout={"max_prompt_length": 16, "max_completion_length": 2000, "num_generations": 64},
        task={"global_batch": 64},
    )  # fmt: skip
    made = plan(asked)
    assert made.memory.verdict == "fits"
    rows = made.recipe.rollout.rows
    assert rows in (1, 2, 4, 8, 16, 32)
    assert any(f"{rows} of them in flight (`rollout.rows`)" in line for line in made.assumptions)
    assert plan(restate_rows(asked, 2 * rows)).memory.verdict != "fits"
    assert plan(restate_rows(asked, rows)).ledger.peak == made.ledger.peak
    roomy = plan(replace(asked, limits=replace(asked.limits, memory="20 GiB")))
    assert roomy.recipe.rollout.rows == 0  # all of them
    assert not any("in flight" in line for line in roomy.assumptions)


@pytest.mark.parametrize("memory", ["3.4 GiB", "3.8 GiB", "5.4 GiB"])
def test_what_its_own_replay_refutes_is_not_chosen_while_something_else_fits(memory):
    """At 3.8 GiB the fastest by the estimate is over by a half per cent of its range."""
    rollout = {"max_prompt_length": 256, "max_completion_length": 256, "num_generations": 8}
    asked = ask(
        model="qwen2.5-0.5b", limits={"memory": memory}, hardware={"device": "rtx-4090"},
        task={"global_batch": 16}, method="lora", precision="bf16-mixed", rollout=rollout,
        allocator="expandable_segments:True",
    )  # fmt: skip
    assert plan(change(asked, {"micro_batch": 1, "recompute": "full"})).memory.verdict == "fits"
    assert plan(asked).memory.verdict == "fits"


@pytest.mark.levers
def test_levers_turn_the_keys_of_a_rollout():
    made = api.plan(ask(method="lora", limits={"memory": "40 GiB"}))
    keys = {key for lever in made.levers for key in lever.changes}
    assert {
        "rollout.rows", "rollout.max_completion_length", "rollout.num_generations",
    } <= keys  # fmt: skip
    by_key = {tuple(lever.changes): lever for lever in made.levers}
    assert "changes what is learned" in by_key[("rollout.max_completion_length",)].because
    assert "changes what is learned" not in by_key[("rollout.rows",)].because


@pytest.mark.ways_out
@pytest.mark.usefixtures("few_ways_out")
def test_activations_on_the_host_are_chosen_offered_and_timed():
    """Where an update is what needs the most: by `auto`, as a lever, and with their seconds."""
    stated = {
        "method": "lora", "model": "qwen3-0.6b", "micro_batch": 1, "recompute": "none",
        "loss": "chunked",
        "rollout": {"max_prompt_length": 512, "max_completion_length": 7680, "rows": 2},
    }  # fmt: skip
    kept, away = plan(ask(**stated)), plan(ask(**stated, offload="activations"))
    assert kept.ledger.peak_phase not in (Phase.PREFILL, Phase.DECODE)
    assert away.memory.device_total < kept.memory.device_total
    limits = {"memory": f"{(away.memory.total_high + kept.memory.device_total) // 2} B"}
    tight = ask(**stated, limits=limits)
    assert plan(tight).memory.verdict != "fits"
    assert plan(change(tight, {"offload": "auto"})).recipe.offload == "activations"
    assert plan(change(tight, {"offload": "auto", "limits.memory": "70 GiB"})).recipe.offload == (
        "none"
    )
    away = plan(change(tight, {"offload": "auto"}))
    least = {"offload": "auto", "limits.host_memory": f"{away.host['offloaded']} B"}
    assert plan(change(tight, least)).recipe == away.recipe
    least["limits.host_memory"] = f"{away.host['offloaded'] - 1} B"
    with pytest.raises(DoesNotFit, match=r"`offload: activations` keeps .* and `limits.host_memo"):
        plan(change(tight, least))
    offered = [way for way in api.plan(tight).ways_out if way.changes == {"offload": "auto"}]
    assert [way.exact for way in offered] == [True]
    turned = [lever.changes for lever in api.predict_with_levers(api.state(kept)).levers]
    assert {"offload": "activations"} in turned
    assert {"offload": "optimizer"} not in turned


def test_inputs_of_recomputed_blocks_cost_less_time_on_the_way_than_all_they_save():
    """On one PCIe link, of rows of 8,192 tokens; both are slower than nothing on the way."""
    stated = {
        "method": "lora", "model": "qwen3-0.6b", "micro_batch": 1, "loss": "chunked",
        "rollout": {"max_prompt_length": 512, "max_completion_length": 7680},
    }  # fmt: skip

    def exposed(**changes):
        spans = plan(ask(**stated, **changes)).timeline.spans
        return sum(span.duration for span in spans if span.op == "offloading")

    assert exposed(recompute="full") == 0
    inputs = exposed(recompute="full", offload="activations")
    assert 0 < inputs < exposed(recompute="none", offload="activations") / 5


@pytest.mark.parametrize(
    ("field", "key"),
    [("max_completion_length", "max_completion_length"), ("num_generations", "num_generations")],
)
def test_the_most_of_a_rollout_that_fits_is_found(field, key):
    """The value found fits, and the next one does not, with all answers in flight."""
    rollout = {"max_prompt_length": 16, "rows": 512}
    if field == "num_generations":
        rollout["max_completion_length"] = 1000
    asked = ask(
        limits={"memory": "1200 MiB"}, hardware={"device": "cpu"}, method="full", micro_batch=1,
        rollout=rollout, task={"global_batch": 64 if field != "num_generations" else "auto"},
        model=DEEP,
    )  # fmt: skip
    solved = api.solve(field, asked)
    assert solved.plan.memory.verdict == "fits"
    assert getattr(solved.plan.recipe.rollout, key) == solved.value
    verdicts = {one.value: one.verdict for one in solved.tried}
    above = [value for value in verdicts if value > solved.value]
    assert above
    assert "fits" not in {verdicts[value] for value in above}
    assert min(above) - solved.value == (1 if field == "num_generations" else 128)


@pytest.mark.parametrize(
    ("field", "objective", "said"),
    [
        ("max_completion_length", "sft", "samples no answers"),
        ("num_generations", "sft", "samples no answers"),
        ("sequence_length", "grpo", "a prompt and its answer"),
    ],
)
def test_what_an_objective_has_not_is_not_solved_for(field, objective, said):
    with pytest.raises(InvalidRequest) as error:
        api.solve(field, ask(objective, rollout={}))
    assert said in error.value.message
    assert error.value.hint


def test_a_plan_is_a_request_again():
    made = plan(ask(policy={"beta": 0.1, "num_iterations": 2}, method="lora", seed=3))
    again = api.predict(restate(made)).recipe
    again = replace(again, lean=made.recipe.lean)  # which other frameworks have none of
    assert again == made.recipe
    assert again.digest == made.recipe.digest


def test_keys_count_in_the_digest_of_sampled_answers_alone():
    plain = make_recipe("llama")
    for changed in ({"rollout": Rollout(rows=3)}, {"policy": Policy(beta=1.0)},
                    {"reward": RewardSettings(funcs=("format",))}):  # fmt: skip
        assert replace(plain, **changed).digest == plain.digest
        sampled = plan(ask()).recipe
        assert replace(sampled, **changed).digest != sampled.digest
    sampled = plan(ask()).recipe
    few = replace(sampled, rollout=replace(sampled.rollout, rows=3))
    assert few.course == sampled.course
    assert "rollout" in to_data(sampled)
    assert sampled.preference == Preference()


def test_pairs_of_sampled_answers_are_ordered_and_compared_as_trl_does():
    """OnlineDPOTrainer's defaults; whatever is left open, an adapter is trained."""
    made = plan(ask("online_dpo"))
    recipe = made.recipe
    assert recipe.rollout == Rollout(num_generations=2, temperature=0.9, **ROLLOUT)
    assert recipe.policy == Policy(loss_type="sigmoid", beta=0.1)
    assert (recipe.method, recipe.reward.missing_eos_penalty) == ("lora", 0.0)
    assert recipe.micro_batch % 2 == 0
    assert {"prefill", "decode", "reference", "backward"} <= set(made.ledger.phases)
    assert "score" not in made.ledger.phases
    pretrained = plan(ask("online_dpo", model="qwen2.5-0.5b", rollout={})).recipe
    assert (pretrained.optimizer.learning_rate, pretrained.method) == (5e-6, "lora")
    other = {
        "policy": {"loss_type": "ipo", "beta": 0.4}, "rollout": ROLLOUT | {"temperature": 0.5},
        "reward": {"funcs": ["number"], "missing_eos_penalty": 2.0},
    }  # fmt: skip
    stated = plan(ask("online_dpo", **other))
    assert stated.recipe.policy == Policy(loss_type="ipo", beta=0.4)
    assert (stated.recipe.rollout.temperature, stated.recipe.reward.missing_eos_penalty) == (0.5, 2)
    assert stated.recipe.digest != recipe.digest
    again = api.predict(restate(stated)).recipe
    assert replace(again, lean=stated.recipe.lean) == stated.recipe


@pytest.mark.levers
def test_levers_of_pairs_hold_whole_pairs():
    """Of the parts of 30 rows, 15 are no whole pairs."""
    made = api.plan(ask("online_dpo", task={"global_batch": 30}, micro_batch=10))
    turned = [one.changes["micro_batch"] for one in made.levers if "micro_batch" in one.changes]
    assert 30 in turned
    assert 15 not in turned


def test_a_recipe_of_grpo_has_the_digest_that_it_had():
    """Keys that came later count where they are set."""
    recipe = plan(ask()).recipe
    fined = replace(recipe.reward, missing_eos_penalty=1.0)
    assert recipe.digest != replace(recipe, reward=fined).digest
    assert "missing_eos_penalty" in to_data(recipe)["reward"]


@pytest.mark.parametrize("guess", ["online-dpo", "onlinedpo", "online dpo", "Online_DPO"])
def test_other_spellings_are_answered_with_the_objective_s_name(guess):
    with pytest.raises(InvalidRequest) as error:
        ask(guess)
    assert "did you mean `online_dpo`?" in error.value.hint


@pytest.mark.parametrize(
    ("objective", "policy"), [("online_dpo", {}), ("grpo", {"beta": 0.1}), ("rloo", {"beta": 0.1})]
)
def test_weights_that_are_trained_have_a_copy_as_their_reference(objective, policy):
    """In the bytes of each phase, with its reason, and of the dtype of what is trained."""
    stated = {"method": "full", "precision": "bf16-mixed", "micro_batch": 2}
    made = plan(ask(objective, policy=policy, **stated))
    entries = [e for e in made.ledger.entries if e.owner == "reference"]
    assert {e.phase for e in entries} == set(made.ledger.phases)
    assert {e.kind for e in entries} == {Kind.PARAMETERS}
    (nbytes,) = {e.nbytes for e in entries}
    parameters = [
        e.nbytes for e in made.ledger.at(Phase.DECODE)
        if e.kind is Kind.PARAMETERS and e.owner not in ("reference", "rotary")
    ]  # fmt: skip
    assert nbytes == sum(parameters)
    assert "a frozen copy of what is trained" in entries[0].because
    assert "frozen copy" in str(made.assumptions)
    alone = plan(ask("grpo", rollout={**ROLLOUT, "num_generations": 2}, **stated))
    assert "reference" not in {e.owner for e in alone.ledger.entries}
    assert made.memory.peak_allocated > alone.memory.peak_allocated + 0.99 * nbytes


def test_online_dpo_takes_adapters_where_nothing_is_stated():
    assert plan(ask("online_dpo")).recipe.method == "lora"


OF_PAIRS = {
    "groups": ({"rollout": {"num_generations": 4}}, "compares two answers to a prompt"),
    "half a pair": ({"task": {"global_batch": 12}, "micro_batch": 3}, "use `micro_batch: 4`"),
    "a loss of tokens": ({"policy": {"loss_type": "dapo"}}, "which has sigmoid, ipo"),
    "no such loss": ({"policy": {"loss_type": "hinge"}}, "sigmoid, ipo (of online_dpo)"),
    "no beta": ({"policy": {"beta": 0.0}}, "`policy.beta: 0` under `objective: online_dpo`"),
    "clipped": ({"policy": {"epsilon": 0.3}}, "it is of `objective: grpo` and `rloo`"),
    "twice": ({"policy": {"num_iterations": 2}}, "`policy.num_iterations: 2`"),
    "another's pairs": ({"preference": {"beta": 0.3}}, "write `policy.loss_type`"),
    "two devices": ({"hardware": {"device": "h100-sxm", "count": 2}}, "2 ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), OF_PAIRS.values(), ids=OF_PAIRS)
def test_a_request_of_sampled_pairs_that_cannot_be_is_refused(changes, said):
    with pytest.raises(InvalidRequest) as error:
        plan(ask("online_dpo", **changes))
    assert said in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ("online_dpo", {"policy": Policy(beta=0.1)}, "which has sigmoid, ipo"),
        ("online_dpo", {"micro_batch": 1, "accumulation": 16}, "micro_batch: 1` is odd"),
        ("online_dpo", {"rollout": Rollout(num_generations=4, **ROLLOUT)}, "two answers"),
        ("grpo", {"policy": Policy(loss_type="sigmoid")}, "the loss of a pair of answers"),
    ],
)
def test_a_recipe_of_another_s_loss_is_not_built(objective, changes, said):
    recipe = replace(plan(ask(objective, method="lora")).recipe, **changes)
    with pytest.raises(InvalidRequest, match=said):
        build_model(recipe, "meta")


REFUSED = {
    "packed": ({"task": {"packing": True}}, "a row holds one answer"),
    "no whole groups": (
        {"task": {"global_batch": 12}}, "num_generations: 8` does not divide `task.global_batch: 12"
    ),
    "one answer": (
        {"rollout": {"num_generations": 1}}, "num_generations: 1` under `objective: grpo`"
    ),
    "another row": ({"task": {"sequence_length": 40}}, "sequence_length: 40` is not"),
    "no room": (
        {"task": {"sequence_length": 16}, "rollout": {"max_completion_length": 16}},
        "leaves no token for a prompt",
    ),
    "more devices than prompts": (
        {"hardware": {"device": "h100-sxm", "count": 4}, "task": {"global_batch": 16}},
        "not shared evenly by 4 ranks",
    ),
    "shared products": (
        {"hardware": {"device": "h100-sxm", "count": 2}, "parallel": {"tp": 2}}, "whole products"
    ),
    "dropout": ({"method": "lora", "lora": {"dropout": 0.1}}, "two masks of dropout"),
    "compiled": ({"compile": "blocks"}, "a compiled block has no cache"),
    "states on the host": ({"offload": "optimizer"}, "`offload: optimizer` under"),
    "rounded": ({"qat": "int8"}, "qat: int8"),
    "scaled": ({"precision": "fp16-mixed"}, "precision: fp16-mixed"),
    "a reference among ranks": (
        {"method": "full", "policy": {"beta": 0.1}, "hardware": {"device": "h100-sxm", "count": 2}},
        "a frozen copy of the weights, which ranks do not share",
    ),
    "bnpo": ({"policy": {"loss_type": "bnpo"}}, "divides by the tokens of a micro-batch"),
    "another's key": ({"policy": {"normalize_advantages": True}}, "it is of `objective: rloo`"),
    "another's step": ({"framework": "hf-trainer"}, "not how it samples and judges"),
    "a misspelt reward": ({"reward": {"funcs": ["numbr"]}}, "did you mean `number`"),
    "no pattern": ({"reward": {"funcs": ["regex"]}}, "has no pattern"),
    "weights": ({"reward": {"funcs": ["number"], "weights": [1.0, 2.0]}}, "2 numbers"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_is_refused(changes, said):
    find = api.predict if "framework" in changes else plan
    with pytest.raises(InvalidRequest) as error:
        find(ask(**changes))
    assert said in f"{error.value.message} {error.value.hint}"
    assert error.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packing": True}, "a row holds one answer"),
        ({"sequence_length": 31}, "a row of 31 tokens"),
        ({"policy": Policy(beta=0.1), "parallel": Parallel(dp_shard=2)}, "ranks do not share"),
        ({"accumulation": 3}, "does not divide `task.global_batch"),
    ],
)
def test_a_recipe_that_cannot_be_is_not_built(changes, said):
    recipe = replace(plan(ask(micro_batch=4, method="full")).recipe, **changes)
    with pytest.raises(InvalidRequest, match=said):
        build_model(recipe, "meta")


def test_rloo_has_none_of_grpo_s_losses():
    with pytest.raises(InvalidRequest, match=r"`policy.loss_type: dapo` under `objective: rloo`"):
        plan(ask("rloo", policy={"loss_type": "dapo"}))


@pytest.mark.parametrize("tool", ["trl", "torchtitan", "megatron"])
def test_no_other_trainer_s_file_claims_rollouts(tool):
    with pytest.raises(InvalidRequest, match="cannot be written for"):
        api.export(plan(ask()), tool)


def test_words_of_trl_are_answered_with_ours():
    for key, value, ours in (
        ("num_generations", 8, "rollout.num_generations: 8"), ("epsilon", 0.3, "policy.epsilon"),
        ("reward_funcs", ["number"], "reward.funcs"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as error:
            ask(**{key: value})
        assert ours in error.value.hint


def test_no_few_steps_on_random_tokens_stand_for_rollouts():
    with pytest.raises(InvalidRequest, match="say nothing of rollouts"):
        measure(plan(ask()).recipe, find_device("h100-sxm"))


JUDGED = {"funcs": ["adapter:not/there"], "adapter": {"rank": 4, "targets": ["q_proj", "o_proj"]}}


@pytest.mark.parametrize("objective", ["ppo", "grpo"])
def test_a_reward_s_adapter_is_planned_before_it_is_there(objective):
    """Which takes a policy that is an adapter, too; the frozen one costs no more than it holds."""
    made = plan(ask(objective, reward=JUDGED))
    assert made.recipe.method == "lora"
    adapter = RewardAdapter(rank=4, alpha=8.0, targets=("q_proj", "o_proj"))
    assert made.recipe.reward == RewardSettings(funcs=("adapter:not/there",), adapter=adapter)
    plain = plan(ask(objective, method="lora"))
    assert made.recipe.digest != plain.recipe.digest
    held = [p.ledger.by_kind(Phase.DECODE)[Kind.PARAMETERS] for p in (made, plain)]
    blocks = CONFIGS["llama"]["num_hidden_layers"]
    assert 0 < held[0] - held[1] < 8 * 4 * (blocks * 4 * 4 * 64 + 64)
    assert held[0] < 1.5 * held[1]
    by_phase = {phase.phase: phase for phase in made.time.phases}
    assert by_phase["reward"].seconds > 0
    assert "the reward model's adapter" in by_phase["reward"].because
    assert next(p for p in plain.time.phases if p.phase == "reward").seconds is None
    assert plan(restate(made)).recipe.reward == made.recipe.reward


def test_a_reward_s_adapter_is_read_from_its_folder(tmp_path):
    folder = write_adapter(tmp_path / "judge", CONFIGS["llama"], rank=3, use_rslora=True)
    found = plan(ask(reward={"funcs": [f"adapter:{folder}"]})).recipe.reward.adapter
    assert found == RewardAdapter(
        rank=3, alpha=6.0, targets=("k_proj", "o_proj"), scaling="rank-stabilised"
    )


ADAPTERS = {
    "no folder": ({"funcs": ["adapter:"]}, {}, "has no folder"),
    "nothing known": ({"funcs": ["adapter:not/there"]}, {}, "`reward.adapter.rank` is not stated"),
    "two": ({"funcs": ["adapter:a", "adapter:b"]}, {}, "`adapter:a` and `adapter:b`"),
    "no function of it": ({"adapter": {"rank": 4}}, {}, "names no adapter's folder"),
    "full": (JUDGED, {"method": "full"}, "adapter:not/there` under `method: full`"),
    "dora": (JUDGED, {"method": "dora"}, "under `method: dora`"),
    "another trainer": (JUDGED, {"framework": "trl", "method": "lora"}, "`framework: trl`"),
    "no such target": (
        {**JUDGED, "adapter": {"rank": 4, "targets": ["c_attn"]}}, {},
        "`reward.adapter.targets`: `c_attn` matches no projection",
    ),
    "the head": (
        {**JUDGED, "adapter": {"rank": 4, "targets": ["lm_head"]}}, {},
        "`reward.adapter.targets`: `lm_head`",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reward", "changes", "words"), ADAPTERS.values(), ids=ADAPTERS)
def test_a_reward_s_adapter_that_cannot_be_is_refused(reward, changes, words):
    with pytest.raises(InvalidRequest, match=words) as raised:
        plan(ask(reward=reward, **changes))
    assert raised.value.hint
