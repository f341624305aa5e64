"""Whole runs on rated answers: what is read, answers to other prompts, references, the log."""

import json
import shutil
from dataclasses import replace as replaced
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_runs import CONFIG, tiny_recipe

from memfit import api
from memfit.adapters.lora import Lora as LoraMethod
from memfit.catalog import find_device
from memfit.certify.tracing.trace_step import trace_step
from memfit.core.errors import InvalidRequest
from memfit.plan.request.problem import read_problem
from memfit.plan.request.wording import restate
from memfit.plan.search.levers import turn
from memfit.records.recipe import Lora, Preference
from memfit.records.request import Hardware, PreferenceRequest, Request, Task
from memfit.records.shapes import bounding_shapes, evaluation_shapes
from memfit.train.data.prepare import build_samplers, find_bounds, read_data
from memfit.train.run.loop import Cadence, train
from memfit.train.step import reference_log_probs as reference_of
from memfit.train.step.preference import Rewards
from memfit.train.step.reference_log_probs import FILE
from memfit.train.step.step import Batch, RatedBatch, evaluate, log_probs, step
from tiny_models import make_built, make_recipe, start_adapters_at_random

OFF = Preference(beta=0.1, loss_type="kto", desirable=1.0, undesirable=1.0, reference="adapter-off")
BEFORE = replace(OFF, reference="precomputed")
UNPAIRED = replace(OFF, loss_type="apo_zero_unpaired")
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


def write_rated(path: Path, count: int = 20) -> str:
    """Numbers are desirable, words are not; two neighbours have the same prompt."""
    lines = []
    for n in range(1, count + 1):
        prompt = {"prompt": f"What follows {n // 2}? "}
        answer = "word " * (n % 7 + 1) if n % 2 else f"{n // 2 + 1} does."
        lines.append(json.dumps({**prompt, "completion": answer, "label": n % 2 == 0}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("rated")
    held_out = write_rated(root / "held_out.jsonl", 5)
    task = Task(objective="kto", data=write_rated(root / "rated.jsonl"), evaluation=held_out)
    return Request(model=CONFIG, task=task, micro_batch=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def recipe_of(preference=OFF, **changes):
    method = "full" if preference.reference == "precomputed" else "lora"
    given = {
        "objective": "kto", "preference": preference, "method": method, "packing": False,
        "lora": LORA if method == "lora" else Lora(), "micro_batch": 4, "accumulation": 2,
        "sequence_length": 64, **changes,
    }  # fmt: skip
    return tiny_recipe(**given)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


CASES = {"adapter-off": OFF, "precomputed": BEFORE, "unpaired": UNPAIRED}


@pytest.mark.parametrize("preference", CASES.values(), ids=CASES)
def test_a_run_raises_what_is_desirable_and_says_so(preference, request_, cache, tmp_path):
    recipe = recipe_of(preference, steps=12, optimizer={"learning_rate": 1e-2})
    run = train(recipe, request_, tmp_path / "run", cache=cache)
    rows = rows_of(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert first["loss"] == pytest.approx(0.5, rel=1e-5)  # 1 - sigmoid(0)
    assert first["reward_desirable"] == first["reward_undesirable"] == 0.0
    assert last["loss"] < first["loss"]
    assert last["reward_margin"] > 0
    assert last["reward_margin"] == pytest.approx(
        last["reward_desirable"] - last["reward_undesirable"]
    )
    assert ("kl" in last) == (preference is not UNPAIRED)
    assert last["evaluation_reward_margin"] > 0
    assert last["evaluation_targets"] == 5
    found = run.measurements
    assert found["loss.final"].unit == "of an answer"
    assert found["reward.margin.evaluation"].value == last["evaluation_reward_margin"]


def read_answer(data, ids, labels):
    return data.tokenizer.decode([t for t in labels if t >= 0]), data.tokenizer.decode(ids)


def test_every_answer_has_its_label_and_an_answer_to_another_prompt(request_, cache):
    recipe = recipe_of(steps=5)
    data = read_data(request_, recipe.model, cache)
    sampler, held_out = build_samplers(request_, recipe, data)
    seen, paired = [], {}
    for at in range(5):  # two epochs
        for micro in sampler.sample(at):
            rated = micro.rated
            for row in range(4):
                own, asked = read_answer(data, micro.input_ids[row], micro.labels[row])
                assert rated.desirable[row] == own.endswith("does.")
                other, changed = read_answer(data, rated.input_ids[row], rated.labels[row])
                prompt = asked.partition("? ")[0]
                assert changed.startswith(f"{prompt}? {other}")
                assert paired.setdefault((prompt, own), other) == other  # in every epoch
                number = int(prompt.removeprefix("What follows "))
                assert other != f"{number + 1} does."
                seen.append((prompt, own))
    assert all(seen.count(one) == 2 for one in set(seen))
    assert len(set(seen)) == 20
    assert sum(micro.answers for micro in held_out.all_once()) == 5
    widest = max(m.input_ids.shape[1] for s in range(5) for m in sampler.sample(s))
    assert sampler.bounds().tokens == widest


def test_answers_to_one_prompt_alone_have_no_baseline(request_, cache, tmp_path):
    file = tmp_path / "same.jsonl"
    file.write_text("\n".join(
        json.dumps({"prompt": "Say it. ", "completion": f"word {n}", "label": True})
        for n in range(6)
    ))  # fmt: skip
    asked = replace(request_, task=replace(request_.task, data=str(file), evaluation=""))
    data = read_data(asked, recipe_of().model, cache)
    with pytest.raises(InvalidRequest, match="have the same prompt"):
        build_samplers(asked, recipe_of(), data)
    build_samplers(asked, recipe_of(UNPAIRED), data)


def test_pairs_are_two_rated_answers(request_, cache, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(
        json.dumps({"prompt": f"What follows {n}? ", "chosen": f"{n + 1}", "rejected": "no"})
        for n in range(6)
    ))  # fmt: skip
    asked = replace(request_, task=replace(request_.task, data=str(file), evaluation=""))
    corpus = read_data(asked, recipe_of().model, cache).training
    assert [corpus.is_desirable(d) for d in range(12)] == [True, False] * 6
    assert corpus.documents == 12


BROKEN = {
    "no label": ({"prompt": "a", "completion": "b"}, "is no rated answer"),
    "a number": ({"prompt": "a", "completion": "b", "label": 1}, "neither true nor false"),
    "a text": ({"prompt": "a", "completion": "b", "label": "true"}, "neither true nor false"),
    "a text to learn": ({"text": "a"}, "is no rated answer"),
}


@pytest.mark.parametrize(("record", "said"), BROKEN.values(), ids=BROKEN)
def test_a_record_that_is_no_rated_answer_is_refused(record, said, request_, cache, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text(json.dumps(record))
    asked = replace(request_, task=replace(request_.task, data=str(file), evaluation=""))
    with pytest.raises(InvalidRequest, match=said):
        read_data(asked, recipe_of().model, cache)


def test_the_reference_is_computed_once_for_both_kinds_of_answers(
    request_, cache, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    recipe = recipe_of(BEFORE, steps=4)
    train(recipe, request_, folder, cache=cache, cadence=Cadence(save_every=2))
    with np.load(folder / FILE) as file:
        assert file["training"].shape == (2, 20)
        assert np.isfinite(file["training"]).all()
        assert (file["training"][0] != file["training"][1]).any()
    whole = rows_of(folder)
    monkeypatch.setattr(reference_of, "log_probs", None)  # a second pass would fail
    (folder / "run.json").unlink()
    for newest in sorted((folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(newest)
    shutil.rmtree(folder / "model")
    train(recipe, request_, folder, cache=cache, cadence=Cadence(save_every=2))
    assert [r["loss"] for r in rows_of(folder)] == [r["loss"] for r in whole]


def make_answers(rows=4, tokens=16):
    random = torch.Generator().manual_seed(3)
    ids, others = torch.randint(0, 90, (2, rows, tokens), generator=random)
    labels = torch.full((rows, tokens), -100)
    labels[:, 5:-1] = ids[:, 6:]
    wrong = torch.full((rows, tokens), -100)
    wrong[:, 5:-3] = others[:, 6:-2]
    desirable = torch.arange(rows) % 2 == 0
    return Batch(ids, labels, rated=RatedBatch(desirable, others, wrong))


def make_trained(recipe):
    return start_adapters_at_random(make_built(recipe), 5, 0.3)


@pytest.mark.parametrize("cut", [{}, {"loss": "chunked", "loss_chunk": 12}], ids=str)
def test_the_adapter_switched_off_is_the_reference_computed_before(cut):
    recipe = make_recipe(
        "llama", objective="kto", method="lora", preference=OFF, micro_batch=4, **cut
    )
    built, batch = make_trained(recipe), make_answers()
    other = Batch(batch.rated.input_ids, batch.rated.labels)
    with LoraMethod().switched_off(built.model):
        of_own, of_others = log_probs(built, batch), log_probs(built, other)
    live = step(built, [batch], 4)
    again = make_trained(replace(recipe, preference=BEFORE))
    given = Batch(
        batch.input_ids, batch.labels, reference=of_own,
        rated=replaced(batch.rated, reference=of_others),
    )  # fmt: skip
    stored = step(again, [given], 4)
    assert torch.equal(live.loss, stored.loss)
    assert torch.equal(live.rewards, stored.rewards)
    assert float(live.rewards[-1]) > 0
    for a, b in zip(built.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert int(evaluate(again, given, Rewards())[1]) == 4
    with pytest.raises(InvalidRequest, match="without its reference"):
        step(again, [batch], 4)


def test_dropout_changes_the_policy_and_not_the_baseline():
    found = []
    for dropout in (0.0, 0.5):
        recipe = make_recipe(
            "llama", objective="kto", method="lora", preference=OFF, micro_batch=4,
            lora=replace(LORA, dropout=dropout),
        )  # fmt: skip
        torch.manual_seed(0)
        found.append(step(make_trained(recipe), [make_answers()], 4))
    plain, dropped = found
    assert plain.rewards[-1] == dropped.rewards[-1]
    assert plain.loss != dropped.loss


@pytest.mark.parametrize("preference", CASES.values(), ids=CASES)
def test_what_was_certified_for_the_data_is_what_the_run_takes(
    preference, request_, cache, tmp_path
):
    recipe = recipe_of(preference, steps=2)
    bounds, held_out = find_bounds(request_, recipe, cache)
    shapes = bounding_shapes(recipe, bounds) * 2
    cpu = find_device("cpu-x86")
    made = trace_step(recipe, cpu, shapes, evaluation=evaluation_shapes(recipe, held_out))
    run = train(recipe, request_, tmp_path / "run", cache=cache)
    assert max(run.phases.values()) == made.peak
    for phase in ("forward", "loss", "backward", "accumulate"):
        assert run.phases[phase] == made.phases[phase]


def planned(**changes):
    task = Task(objective="kto", sequence_length=64, global_batch=8, steps=3)
    given = {
        "model": CONFIG, "task": task, "hardware": Hardware(device="cpu-x86"), "micro_batch": 4,
    }  # fmt: skip
    return Request(**(given | changes))


def test_a_plan_keeps_the_micro_batch_and_is_a_request_again():
    plan = api.plan(planned(method="lora"), levers=False)
    assert plan.recipe.preference == OFF
    assert (plan.recipe.micro_batch, plan.recipe.accumulation) == (4, 2)
    assert api.predict(restate(plan)).recipe.preference == OFF
    turned = [dict(way) for way, _ in turn(read_problem(planned(method="lora")), plan.recipe)]
    assert {"preference.reference": "precomputed"} in turned
    assert not any("micro_batch" in way for way in turned)
    free = PreferenceRequest(loss_type="apo_zero_unpaired")
    other = planned(method="lora", micro_batch="auto", preference=free)
    plan = api.plan(other, levers=False)
    assert plan.recipe.preference == UNPAIRED
    turned = [dict(way) for way, _ in turn(read_problem(other), plan.recipe)]
    assert any("micro_batch" in way for way in turned)
    half = replace(plan.recipe, micro_batch=plan.recipe.micro_batch // 2, accumulation=2)
    assert half.course == plan.recipe.course


def test_a_baseline_on_many_ranks_is_that_of_a_micro_batch_of_all_of_them():
    plan = api.plan(
        planned(method="lora", hardware=Hardware(device="h100-sxm", count=2)), levers=False
    )
    shared = plan.recipe
    assert shared.parallel.dp == 2
    alone = replace(
        shared, parallel=replace(shared.parallel, dp_shard=1, dp_replicate=1),
        micro_batch=2 * shared.micro_batch,
    )  # fmt: skip
    assert shared.course == alone.course
    less = replace(alone, micro_batch=shared.micro_batch, accumulation=2 * alone.accumulation)
    assert less.course != alone.course


@pytest.mark.parametrize("framework", ["trl", "hf-trainer"])
def test_other_frameworks_are_refused_before_their_micro_batch_is(framework):
    with pytest.raises(InvalidRequest, match="describes how it computes `objective: dpo`"):
        api.predict(planned(framework=framework, method="lora", micro_batch=1))


def test_a_run_cut_otherwise_does_not_go_on_from_its_checkpoint(request_, cache, tmp_path):
    train(recipe_of(steps=2), request_, tmp_path / "run", cache=cache)
    other = recipe_of(steps=2, micro_batch=2, accumulation=4)
    with pytest.raises(InvalidRequest, match="of recipe"):
        train(other, request_, tmp_path / "run", cache=cache)
