"""Whole runs on pairs: batches, references computed once, resuming, the log; and the plan."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tiny_runs import CONFIG, tiny_recipe

from memfit import api
from memfit.catalog import find_device
from memfit.certify import trace
from memfit.certify.tracing.trace_step import trace_step
from memfit.core.errors import InvalidRequest
from memfit.plan.request.problem import read_problem
from memfit.plan.request.wording import restate
from memfit.plan.search.levers import turn
from memfit.plan.search.search import search
from memfit.records.recipe import Lora, Preference
from memfit.records.request import Hardware, Limits, PreferenceRequest, Request, Task
from memfit.records.shapes import bounding_shapes, evaluation_shapes
from memfit.train.data.packing import PairRows
from memfit.train.data.prepare import build_samplers, find_bounds, find_lengths, read_data
from memfit.train.measure.counters import to_batch
from memfit.train.run.loop import Cadence, train
from memfit.train.step import reference_log_probs as reference_of
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from memfit.train.step.reference_log_probs import FILE
from memfit.train.step.step import log_probs

OFF = Preference(beta=0.1, reference="adapter-off")
BEFORE = Preference(beta=0.1, reference="precomputed")
ORPO = Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0)
CPO = Preference(beta=0.1, cross_entropy=1.0)
KTO = Preference(beta=0.1, loss_type="kto", desirable=1.0, undesirable=1.0, reference="adapter-off")
SIMPO = Preference(beta=2.0, loss_type="simpo", gamma=0.5)
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


def write_pairs(path: Path, count: int = 20) -> str:
    lines = []
    for n in range(1, count + 1):
        answers = {"chosen": f"{n + 1} does.", "rejected": "word " * (n % 7) or "no"}
        lines.append(json.dumps({"prompt": f"What follows {n}? ", **answers}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    data = write_pairs(root / "pairs.jsonl")
    held_out = write_pairs(root / "held_out.jsonl", 5)
    return Request(model=CONFIG, task=Task(objective="dpo", data=data, evaluation=held_out))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def recipe_of(preference=OFF, **changes):
    method = "full" if preference is BEFORE else "lora"
    given = {
        "objective": "dpo", "preference": preference, "method": method, "packing": False,
        "lora": LORA if method == "lora" else Lora(), "micro_batch": 4, "accumulation": 2,
        "sequence_length": 64, **changes,
    }  # fmt: skip
    return tiny_recipe(**given)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preference", [OFF, BEFORE], ids=["adapter-off", "precomputed"])
def test_a_run_prefers_what_was_chosen_and_says_so(preference, request_, cache, tmp_path):
    recipe = recipe_of(preference, steps=12, optimizer={"learning_rate": 1e-2})
    run = train(recipe, request_, tmp_path / "run", cache=cache)
    rows = rows_of(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert first["loss"] == pytest.approx(0.6931472, rel=1e-5)
    assert (first["reward_margin"], first["reward_accuracy"]) == (0.0, 0.0)
    assert last["loss"] < first["loss"]
    assert last["reward_margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"])
    assert last["reward_margin"] > 0
    assert last["evaluation_reward_accuracy"] > 0.5
    found = run.measurements
    assert found["loss.final"].unit == found["loss.evaluation"].unit == "nats/pair"
    assert found["reward.accuracy.final"].value == last["reward_accuracy"]
    assert found["reward.margin.evaluation"].value == last["evaluation_reward_margin"]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_of_simpo_needs_no_reference(method, request_, cache, tmp_path):
    asked = replace(request_, task=replace(request_.task, objective="simpo"))
    recipe = recipe_of(
        SIMPO, objective="simpo", method=method, lora=LORA if method == "lora" else Lora(),
        steps=12, optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    run = train(recipe, asked, tmp_path / "run", cache=cache)
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["reward_margin"] > rows[0]["reward_margin"]
    assert run.measurements["loss.final"].unit == "nats/pair"
    assert not (tmp_path / "run" / FILE).exists()


@pytest.mark.parametrize(
    ("objective", "preference", "method"),
    [("orpo", ORPO, "full"), ("orpo", ORPO, "lora"), ("cpo", CPO, "lora")],
)
def test_a_run_learns_the_preferred_rows_beside_the_comparison(
    objective, preference, method, request_, cache, tmp_path
):
    asked = replace(request_, task=replace(request_.task, objective=objective))
    recipe = recipe_of(
        preference, objective=objective, method=method, lora=LORA if method == "lora" else Lora(),
        steps=12, optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    run = train(recipe, asked, tmp_path / "run", cache=cache)
    rows = rows_of(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert last["loss"] < first["loss"]
    assert last["cross_entropy"] < first["cross_entropy"]
    assert last["evaluation_cross_entropy"] < first["cross_entropy"]
    assert last["evaluation_loss"] > last["evaluation_cross_entropy"]
    unit = run.measurements["cross_entropy.evaluation"]
    assert (unit.value, unit.unit) == (last["evaluation_cross_entropy"], "nats/token")
    assert not (tmp_path / "run" / FILE).exists()


def test_an_evaluation_is_the_mean_of_pairs_and_of_tokens(request_, cache, tmp_path):
    """Five pairs in micro-batches of two and of four rows, one of them filled up."""
    asked = replace(request_, task=replace(request_.task, objective="orpo"))
    seen = []
    for micro in (2, 4):
        recipe = recipe_of(
            ORPO, objective="orpo", method="full", lora=Lora(), steps=1, micro_batch=micro,
            accumulation=8 // micro,
        )  # fmt: skip
        train(recipe, asked, tmp_path / f"{micro}", cache=cache)
        (row,) = rows_of(tmp_path / f"{micro}")
        seen.append({k: v for k, v in row.items() if "loss" in k or "entropy" in k})
    one, two = seen
    assert one == pytest.approx(two, rel=1e-5)


def test_what_preferred_rows_say_beside_answers_is_the_prompt(request_, cache):
    asked = replace(request_, task=replace(request_.task, objective="orpo"))
    recipe = recipe_of(ORPO, objective="orpo")
    data = read_data(asked, recipe.model, cache)
    sampler, held_out = build_samplers(asked, recipe, data)
    micros = [*sampler.sample(0), *held_out.all_once()]
    for micro in micros:
        assert (micro.context[1::2] == -100).all()
        for ids, answer, asked_ in zip(
            micro.input_ids[::2], micro.labels[::2], micro.context[::2], strict=True
        ):
            if (answer == -100).all():  # a row that fills a micro-batch up
                assert (asked_ == -100).all()
                continue
            assert ((answer == -100) | (asked_ == -100)).all()
            told = np.maximum(answer, asked_)
            end = np.flatnonzero(answer != -100)[-1]
            assert (told[:end] == ids[1 : end + 1]).all()
            assert (told[end + 1 :] == -100).all()
            said = data.tokenizer.decode([t for t in asked_ if t >= 0])
            assert said.endswith("? ")
        assert micro.learned_beside == int(
            (np.maximum(micro.labels, micro.context)[::2] != -100).sum()
        )


def test_a_micro_batch_holds_whole_pairs_with_the_preferred_first(request_, cache):
    recipe = recipe_of()
    data = read_data(request_, recipe.model, cache)
    sampler, held_out = build_samplers(request_, recipe, data)
    seen = []
    for step in range(5):  # two epochs of 20 pairs
        for micro in sampler.sample(step):
            for row in range(0, 4, 2):
                chosen, rejected = (
                    data.tokenizer.decode([t for t in micro.labels[row + i] if t >= 0])
                    for i in (0, 1)
                )
                asked = data.tokenizer.decode(micro.input_ids[row]).partition("? ")[0]
                assert asked == data.tokenizer.decode(micro.input_ids[row + 1]).partition("? ")[0]
                number = int(asked.removeprefix("What follows "))
                assert chosen == f"{number + 1} does."
                assert rejected == ("word " * (number % 7) or "no")
                seen.append(number)
    assert sorted(seen) == list(range(1, 21))
    assert sum(micro.pairs for micro in held_out.all_once()) == 5
    bounds = sampler.bounds()
    assert bounds.tokens == max(m.input_ids.shape[1] for s in range(6) for m in sampler.sample(s))


def test_pairs_that_lose_an_answer_to_the_length_are_left_out(request_, cache):
    data = read_data(request_, recipe_of().model, cache)
    lengths = sorted(data.training.lengths.tolist())
    width = lengths[-1] - 1
    recipe = recipe_of(sequence_length=width)
    sampler, _ = build_samplers(request_, recipe, data)
    assert any(f"cut to sequence_length {width}" in note for note in sampler.notes)
    assert sampler.bounds().tokens == width
    with pytest.raises(InvalidRequest, match="has an answer within sequence_length 3"):
        build_samplers(request_, replace(recipe, sequence_length=3), data)


def test_rows_of_pairs_are_a_permutation_of_whole_pairs_each_epoch():
    lengths = np.array([3, 4, 5, 0, 6, 7, 8, 9])  # the second pair has an answer of none
    rows = PairRows(lengths, seed=3)
    assert rows.per_epoch == 6
    for epoch in range(3):
        shown = [rows.row(6 * epoch + i)[0].document for i in range(6)]
        assert sorted(shown) == [0, 1, 4, 5, 6, 7]
        assert all(b == a + 1 for a, b in zip(shown[::2], shown[1::2], strict=True))
    costs = rows.costs(4, 10)
    assert costs.tolist() == [[n, 1, n] for n in (rows.row(i)[0].length for i in range(4, 14))]
    assert rows.row(6, once=True) == ()


def test_the_reference_is_computed_once_and_is_that_of_the_first_weights(
    request_, cache, tmp_path, monkeypatch
):
    recipe = recipe_of(BEFORE, steps=4)
    folder = tmp_path / "run"
    train(recipe, request_, folder, cache=cache, cadence=Cadence(save_every=2))
    with np.load(folder / FILE) as file:
        stored = file["training"]
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    sampler, _ = build_samplers(request_, recipe, read_data(request_, recipe.model, cache))
    seen = list(sampler.all_once())[: recipe.steps * recipe.accumulation]
    assert np.isnan(stored).sum() == len(stored) - 4 * len(seen)  # no step looks at the others
    for index, micro in enumerate(seen):
        expected = log_probs(built, to_batch(micro, built.device))
        documents = sampler.documents_of(index)
        assert stored[documents].tolist() == expected.tolist()[: len(documents)]
    whole = rows_of(folder)
    monkeypatch.setattr(reference_of, "log_probs", None)  # a second pass would fail
    (folder / "run.json").unlink()
    for newest in sorted((folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(newest)
    shutil.rmtree(folder / "model")
    train(recipe, request_, folder, cache=cache, cadence=Cadence(save_every=2))
    again = rows_of(folder)
    assert [r["loss"] for r in again] == [r["loss"] for r in whole]


def test_a_reference_of_another_run_is_not_used(request_, cache, tmp_path):
    folder = tmp_path / "run"
    recipe = recipe_of(BEFORE, steps=2)
    train(recipe, request_, folder, cache=cache)
    with np.load(folder / FILE) as file:
        stored = dict(file)
    other = tmp_path / "other"
    other.mkdir()
    np.savez(other / FILE, **(stored | {"training": stored["training"] * 0}))
    with np.load(other / FILE) as file:
        assert str(file["key"]) == str(stored["key"])
    longer = replace(recipe, steps=3)
    train(longer, request_, other, cache=cache)
    with np.load(other / FILE) as file:
        assert str(file["key"]) != str(stored["key"])
        assert np.nanmax(file["training"]) < -1


@pytest.mark.parametrize("preference", [OFF, BEFORE], ids=["adapter-off", "precomputed"])
def test_what_was_certified_for_the_data_is_what_the_run_takes(
    preference, request_, cache, tmp_path
):
    recipe = recipe_of(preference, steps=2)
    bounds, held_out = find_bounds(request_, recipe, cache)
    cpu = find_device("cpu-x86")
    shapes = bounding_shapes(recipe, bounds) * 2
    made = trace_step(recipe, cpu, shapes, evaluation=evaluation_shapes(recipe, held_out))
    run = train(recipe, request_, tmp_path / "run", cache=cache)
    assert max(run.phases.values()) == made.peak
    for phase in ("forward", "loss", "backward", "accumulate"):
        assert run.phases[phase] == made.phases[phase]
    assert trace(recipe, cpu).peak > made.peak  # rows are shorter than the sequence length


def test_epochs_are_counted_in_pairs(request_, cache):
    reference = recipe_of().model
    asked = replace(request_, task=replace(request_.task, epochs=2.0, global_batch=8))
    assert find_lengths(asked, reference, 64, cache).task.steps == 10


def planned(**changes):
    task = Task(objective="dpo", sequence_length=64, global_batch=8, steps=3)
    given = {"model": CONFIG, "task": task, "hardware": Hardware(device="cpu-x86")} | changes
    return Request(**given)


def test_a_plan_decides_pairs_and_references():
    full = api.plan(planned(), levers=False)
    assert full.recipe.method == "full"  # random weights
    assert full.recipe.preference == BEFORE
    assert full.recipe.micro_batch % 2 == 0
    assert not full.recipe.packing
    lora = api.plan(planned(method="lora"), levers=False)
    assert lora.recipe.preference == OFF
    assert all(c.label.split("micro-batch ")[1][0] in "2468" for c in lora.considered)
    turned = [dict(way) for way, _ in turn(read_problem(planned(method="lora")), lora.recipe)]
    assert {"preference.reference": "precomputed"} in turned
    assert all(way.get("micro_batch", 2) % 2 == 0 for way in turned)


def test_a_plan_of_simpo_has_no_reference_and_is_a_request_again(tmp_path):
    task = Task(objective="simpo", sequence_length=64, global_batch=8, steps=3)
    asked = planned(task=task, method="lora", preference=PreferenceRequest(beta=2.0))
    plan = api.plan(asked, levers=False)
    assert plan.recipe.preference == replace(SIMPO, gamma=0.5)
    assert api.predict(restate(plan)).recipe.preference == plan.recipe.preference
    turned = [dict(way) for way, _ in turn(read_problem(asked), plan.recipe)]
    assert not any("preference.reference" in way for way in turned)
    dpo = api.plan(planned(preference=PreferenceRequest(loss_type="discopop")), levers=False)
    assert dpo.recipe.preference.tau == 0.05
    assert dpo.recipe.preference.gamma == 0.0


def test_a_plan_of_orpo_and_cpo_is_a_request_again():
    for objective, asked, expected in (
        ("orpo", PreferenceRequest(), ORPO),
        ("cpo", PreferenceRequest(cross_entropy=0.5), replace(CPO, cross_entropy=0.5)),
        ("cpo", PreferenceRequest(cross_entropy=0.0), replace(CPO, cross_entropy=0.0)),
    ):
        task = Task(objective=objective, sequence_length=64, global_batch=8, steps=3)
        plan = api.plan(planned(task=task, method="lora", preference=asked), levers=False)
        assert plan.recipe.preference == expected
        assert api.predict(restate(plan)).recipe.preference == expected


def test_the_search_can_choose_only_what_the_build_accepts():
    found = search(read_problem(planned(method="lora", limits=Limits(memory="1.2 MiB"))))
    build_model(found.recipe, "cpu")


REFUSED = {
    "odd batch": ({"task": Task(objective="dpo", global_batch=5)}, "`task.global_batch: 5` is odd"),
    "odd micro-batch": (
        {"task": Task(objective="dpo", global_batch=9 * 2), "micro_batch": 9},
        "`micro_batch: 9` is odd",
    ),
    "packed": ({"task": Task(objective="dpo", packing=True)}, "row by row"),
    "no adapter": (
        {"method": "full", "preference": PreferenceRequest(reference="adapter-off")},
        "has no adapter",
    ),
    "a reference of simpo": (
        {"task": Task(objective="simpo"), "preference": PreferenceRequest(reference="precomputed")},
        "without a reference",
    ),
    "a loss of another objective": (
        {"task": Task(objective="simpo"), "preference": PreferenceRequest(loss_type="ipo")},
        "is not a loss of `objective: simpo`",
    ),
    "a margin of dpo": (
        {"preference": PreferenceRequest(gamma=0.5)},
        "`preference.gamma: 0.5` with",
    ),
    "a global batch that has no part for kto's baseline": (
        {"task": Task(objective="kto", global_batch=11)},
        "has 2 to 8 rows",
    ),
    "kto's baseline of one row": (
        {"task": Task(objective="kto"), "micro_batch": 1},
        "is a mean over a micro-batch",
    ),
    "kto of another framework": (
        {"framework": "trl", "task": Task(objective="kto"), "micro_batch": 2},
        "describes how it computes",
    ),
    "a cross-entropy of dpo": (
        {"preference": PreferenceRequest(cross_entropy=1.0)},
        "the comparison alone",
    ),
    "another weight of orpo's cross-entropy": (
        {"task": Task(objective="orpo"), "preference": PreferenceRequest(cross_entropy=0.5)},
        "whose own is 1",
    ),
    "alphapo": (
        {"task": Task(objective="cpo"), "preference": PreferenceRequest(loss_type="alphapo")},
        "powers of probabilities",
    ),
    "orpo of another framework": (
        {"framework": "trl", "task": Task(objective="orpo")},
        "describes how it computes",
    ),
    "simpo of another framework": (
        {"framework": "trl", "task": Task(objective="simpo")},
        "describes how it computes",
    ),
    "a loss of another framework": (
        {"framework": "trl", "preference": PreferenceRequest(loss_type="ipo")},
        "with `loss_type: sigmoid` alone",
    ),
    "another framework": ({"framework": "torchtune"}, "not how it compares pairs"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_is_refused(changes, said):
    request = planned(**changes)
    with pytest.raises(InvalidRequest, match=said):
        api.predict(request) if request.framework != "memfit" else api.plan(request)


def test_a_plan_of_pairs_on_many_devices_cuts_the_model_among_them():
    many = planned(
        method="lora", hardware=Hardware(device="h100-sxm", count=2), precision="bf16",
    )  # fmt: skip
    plan = api.plan(many, levers=False)
    assert plan.recipe.parallel.dp == 2
    assert plan.recipe.micro_batch % 2 == 0
    assert plan.recipe.global_batch == 8
    assert plan.recipe.preference == OFF


def test_a_recipe_without_pairs_keeps_its_digest():
    plain = tiny_recipe()
    assert plain.digest == replace(plain, preference=Preference()).digest
    assert recipe_of(OFF).digest != recipe_of(replace(OFF, beta=0.2)).digest


def test_the_requests_of_the_page_on_objectives_plan(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
    write_pairs(tmp_path / "pairs.jsonl")
    scores = Preference(beta=1.0, loss_type="bradley_terry", center=0.01)
    expected = [OFF, KTO, ORPO, CPO, scores, Preference(beta=2.0, loss_type="simpo", gamma=1.0)]
    requests = [part for part in text.split("```yaml\n")[1:] if "\nrollout:" not in part]
    for part, preference in zip(requests, expected, strict=True):
        request = tmp_path / "request.yaml"
        request.write_text(part.split("```")[0])
        plan = api.plan(api.read(request), levers=False)
        assert plan.recipe.preference == preference
        assert plan.recipe.global_batch == 32
