"""An iteration of reinforcement learning in seconds: its phases are those of memfit's own loop."""

import dataclasses
from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from memfit import api
from memfit.adapters import find_adapter
from memfit.core.errors import DoesNotFit
from memfit.core.units import show_seconds
from memfit.families import read_model
from memfit.plan.step_time.predicted_time import count_work, sum_up
from memfit.plan.step_time.rollouts.phases import count, reaches
from memfit.records import from_data, to_json
from memfit.records.ledger import Phase
from memfit.records.request import Request
from memfit.train.generation.calls import Caller
from memfit.train.measure.observer import NOBODY
from memfit.train.rl.learn import iterate
from memfit.train.rl.rehearsal import make_learning
from memfit.train.rl.sampling import sample_in_slots
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from tiny_models import CONFIGS

ROLLOUT = {"num_generations": 4, "max_prompt_length": 12, "max_completion_length": 20}


def ask(objective="grpo", **changes):
    data = {
        "model": CONFIGS["llama"], "weights": "random", "hardware": {"device": "h100-sxm"},
        "reward": {"funcs": ["number"]}, "method": "lora", **changes,
    }  # fmt: skip
    data["rollout"] = {**ROLLOUT, **changes.get("rollout", {})}
    data["task"] = {
        "objective": objective,
        "steps": 3,
        "global_batch": 16,
        **changes.get("task", {}),
    }
    return from_data(data, Request, source="here")


def plan(request):
    return api.plan(request, levers=False)


def by_phase(made):
    return {phase.phase: phase for phase in made.time.phases}


def run(recipe, monkeypatch):
    """One iteration of memfit's own loop on a CPU, all lengths at their bounds: what it calls."""
    recipe = replace(recipe, device="cpu", precision="fp32", base_format="fp32", attention="math")
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    prompts, steps, entered = [], Counter(), []
    prefill, decode = Caller.prefill, Caller.decode

    def count_prefill(self, slots, asked, now):
        prompts.append(len(asked))
        return prefill(self, slots, asked, now)

    def count_decode(self, slots, tokens, positions, columns=0):
        steps[len(tokens), columns] += 1
        return decode(self, slots, tokens, positions, columns)

    monkeypatch.setattr(Caller, "prefill", count_prefill)
    monkeypatch.setattr(Caller, "decode", count_decode)

    class Entered:
        register_batch = NOBODY.register_batch
        register_cache = NOBODY.register_cache

        def enter(self, phase):
            entered.append(phase)

    learning = make_learning(recipe, NOBODY, recipe.rollout.max_prompt_length)
    sampling = dataclasses.replace(learning.sampling, sample=sample_in_slots)
    learning = dataclasses.replace(learning, sampling=sampling)
    iterate(built, learning, 0, observer=Entered())
    return prompts, steps, entered


@pytest.mark.parametrize("rows", [16, 8, 4, 6])
def test_steps_and_what_they_reach_are_those_of_the_loop(rows, monkeypatch):
    recipe = plan(ask(rollout={"rows": rows})).recipe
    prompts, steps, _ = run(recipe, monkeypatch)
    counts = count(recipe, architecture(recipe))
    assert sum(prompts) == counts.prompts == 4
    expected = Counter()
    for wave in range(counts.waves):
        width = min(rows, counts.answers - wave * rows)
        for columns, times in reaches(counts, recipe.rollout.reach):
            expected[width, columns] += times
    assert steps == expected


def architecture(recipe):
    return read_model(recipe.model).architecture


SCORED = (Phase.SCORE, Phase.REFERENCE, Phase.VALUES)
PASSES = {
    "grpo": ({}, ()),
    "grpo, a reference": ({"policy": {"beta": 0.1}}, (Phase.REFERENCE,)),
    "grpo, two updates": ({"policy": {"num_iterations": 2}}, (Phase.SCORE,)),
    "rloo": ({"objective": "rloo"}, (Phase.SCORE, Phase.REFERENCE)),
    "ppo": ({"objective": "ppo"}, (Phase.SCORE, Phase.REFERENCE, Phase.VALUES)),
    "rloo, no reference": ({"objective": "rloo", "policy": {"beta": 0.0}}, ()),
}


@pytest.mark.parametrize(("changes", "passes"), PASSES.values(), ids=PASSES)
def test_passes_beside_the_update_are_those_that_run(changes, passes, monkeypatch):
    made = plan(ask(**changes))
    _, _, entered = run(made.recipe, monkeypatch)
    ran = [p for p in dict.fromkeys(entered) if p in SCORED]
    assert ran == list(passes)
    found = [phase.phase for phase in made.time.phases]
    assert found == ["switch", "prefill", "decode", "reward", *map(str, passes), "update"]


def test_a_plan_adds_up_its_phases_and_a_run_its_iterations():
    made = plan(ask(policy={"beta": 0.1}))
    time, phases = made.time, by_phase(made)
    known = [p for p in time.phases if p.seconds is not None]
    assert time.step_seconds == pytest.approx(sum(p.seconds for p in known))
    assert time.step_seconds == pytest.approx(made.timeline.seconds)
    assert time.total_seconds == pytest.approx(3 * time.step_seconds)
    assert made.cost.device_hours == pytest.approx(time.total_seconds / 3600)
    assert made.cost.usd > 0
    for phase in known:
        assert phase.seconds_low < phase.seconds < phase.seconds_high
    assert time.step_seconds_low == pytest.approx(sum(p.seconds_low for p in known))
    assert time.step_seconds_high == pytest.approx(sum(p.seconds_high for p in known))
    assert phases["reward"].seconds is None
    assert phases["decode"].tokens == 16 * 20
    assert phases["prefill"].tokens == 4 * 12
    assert phases["reference"].tokens == phases["update"].tokens == 16 * 32
    rate = phases["decode"].tokens / phases["decode"].seconds
    assert phases["decode"].tokens_per_second == pytest.approx(rate)
    json = msgspec.json.decode(to_json(made))["time"]["phases"]
    assert [p["phase"] for p in json] == [p.phase for p in time.phases]
    again = plan(ask(policy={"beta": 0.1, "num_iterations": 2}))
    assert by_phase(again)["update"].seconds == pytest.approx(2 * phases["update"].seconds)
    spans = sum(s.duration for s in again.timeline.spans)
    assert spans == pytest.approx(again.time.step_seconds)


def test_lengths_are_their_bounds_and_the_plan_says_so():
    made = plan(ask())
    (said,) = (line for line in made.assumptions if "upper end" in line)
    assert "at its bound (12 and 20 tokens)" in said
    half = plan(ask(rollout={"max_completion_length": 10})).time.step_seconds
    assert f"with 10 tokens an answer an iteration takes {show_seconds(half)}" in said
    assert half < made.time.step_seconds
    rounds = plan(ask(rollout={"dynamic_sampling": 2}))
    assert "all 3 rounds" in " ".join(rounds.assumptions)
    for name, phase in by_phase(made).items():
        times = 3 if name in ("switch", "prefill", "decode") else 1
        if phase.seconds is not None:
            assert by_phase(rounds)[name].seconds == pytest.approx(times * phase.seconds)


def test_fewer_rows_in_flight_take_longer():
    seconds = [plan(ask(rollout={"rows": n})).time.step_seconds for n in (16, 8, 4)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_limits_of_time_are_held_against_iterations():
    with pytest.raises(DoesNotFit, match=r"answers as long as they may be.*`limits.time`"):
        plan(ask(task={"steps": 10_000_000}, limits={"time": "1 h"}))


def test_a_device_of_unknown_speed_has_no_seconds():
    made = plan(ask(hardware={"device": "cpu"}))
    assert (made.time.step_seconds, made.time.phases, made.timeline.spans) == (None, (), ())
    assert "unknown" in made.time.because
    assert not any("upper end" in line for line in made.assumptions)


def test_a_chunked_loss_makes_its_logits_twice():
    found = {}
    for loss in ("plain", "chunked"):
        made = plan(ask(loss=loss))
        totals = sum_up(find_adapter(made.recipe).adapt(read_model(made.recipe.model), made.recipe))
        (head,) = (span for span in made.timeline.spans if span.op == "head")
        found[loss] = count_work(totals, made.recipe), head.duration
    (plain, short), (chunked, long) = found.values()
    assert chunked.model == plain.model
    a = architecture(made.recipe)
    head = 2 * 16 * 32 * a.hidden * a.vocab
    assert chunked.hardware - plain.hardware == pytest.approx(head, rel=1e-9)
    assert long > short
