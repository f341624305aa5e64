"""Reward models: whole runs, and what transformers and peft make of the folder they leave."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from tiny_runs import CONFIG, tiny_recipe
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
)

from memfit import api
from memfit.catalog import find_device
from memfit.certify import certify
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.plan.request.problem import read_problem
from memfit.plan.request.wording import restate
from memfit.plan.search.levers import turn
from memfit.records.ledger import Phase
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora, Preference
from memfit.records.request import Hardware, PreferenceRequest, Request, Task
from memfit.train.data.prepare import build_samplers, read_data
from memfit.train.run.generate import generate
from memfit.train.run.loop import Cadence, train
from memfit.train.step.build import build_model, fill_weights
from memfit.train.step.preference import row_scores
from tiny_models import CONFIGS, make_built, make_recipe

SCORES = Preference(beta=1.0, loss_type="bradley_terry", center=0.01)
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
HELD_OUT = range(1, 6)


def answers_of(n):
    return f"What follows {n}? ", f"{n + 1} does.", "word " * (n % 7) or "no"


def write_pairs(path: Path, numbers=range(1, 21), **columns) -> str:
    lines = []
    for n in numbers:
        row = dict(zip(("prompt", "chosen", "rejected"), answers_of(n), strict=True))
        lines.append(json.dumps(row | columns))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("rewards")
    held_out = write_pairs(root / "held_out.jsonl", HELD_OUT)
    task = Task(objective="reward", data=write_pairs(root / "pairs.jsonl"), evaluation=held_out)
    asked = Request(model=CONFIG, task=task)
    recipe = recipe_of(steps=12, optimizer={"learning_rate": 1e-2})
    run = train(recipe, asked, root / "run", cache=root / "cache")
    return root, asked, recipe, run


def recipe_of(**changes):
    given = {
        "objective": "reward", "preference": SCORES, "packing": False, "micro_batch": 4,
        "accumulation": 2, "sequence_length": 64, **changes,
    }  # fmt: skip
    return tiny_recipe(**given)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def scores_of(model, folder):
    """Of both answers to every held-out prompt, in one padded batch, as transformers scores."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [(p, a) for n in HELD_OUT for p, *both in [answers_of(n)] for a in both]
    rows = [  # a prompt and its answer are tokens of their own
        [i for text in pair for i in tokenizer(text)["input_ids"]] + [tokenizer.eos_token_id]
        for pair in texts
    ]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        found = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert found.shape == (len(texts), 1)
    return found.view(-1, 2)


def test_a_run_scores_what_was_chosen_higher_and_says_so(home):
    root, _, _, run = home
    first, *_, last = rows_of(root / "run")
    assert last["loss"] < first["loss"]
    assert last["reward_margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"])
    assert last["evaluation_reward_accuracy"] == 1.0
    assert run.measurements["loss.final"].unit == "nats/pair"
    assert run.measurements["reward.accuracy.evaluation"].value == 1.0


def test_transformers_loads_the_folder_and_scores_as_the_trainer_did(home):
    root, *_ = home
    last, folder = rows_of(root / "run")[-1], root / "run" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    chosen, rejected = scores_of(model, folder).mean(0).tolist()
    assert chosen == pytest.approx(last["evaluation_reward_chosen"], rel=1e-5)
    assert rejected == pytest.approx(last["evaluation_reward_rejected"], rel=1e-5)


def of_folder(place):
    config = json.loads((place / "config.json").read_text())
    return ModelReference(name="base", source=str(place), config=config)


def test_an_adapter_is_peft_s_of_a_sequence_classifier(home):
    root, asked, *_ = home
    base, run = root / "run" / "model", root / "adapted"
    lora = recipe_of(model=of_folder(base), weights="pretrained", method="lora", lora=LORA, steps=4,
                     optimizer={"learning_rate": 1e-2})  # fmt: skip
    train(lora, replace(asked, model=str(base)), run, cache=root / "cache")
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    plain = AutoModelForSequenceClassification.from_pretrained(base)
    before = scores_of(plain, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers renamed
        theirs = PeftModel.from_pretrained(plain, str(run / "model"))
    found, last = scores_of(theirs, base), rows_of(run)[-1]
    assert found.mean(0).tolist() == pytest.approx(
        [last["evaluation_reward_chosen"], last["evaluation_reward_rejected"]], rel=1e-5
    )
    assert not torch.allclose(found, before)
    with pytest.raises(InvalidRequest, match="modules_to_save"):
        api.merge(run, root / "merged")


def test_a_head_goes_on_from_a_folder_that_has_one_and_is_random_else(home, tmp_path):
    root, _, recipe, _ = home
    place = root / "run" / "model"
    goes_on = make_built(replace(recipe, model=replace(of_folder(place), head="score"),
                                 weights="pretrained"))  # fmt: skip
    kept = AutoModelForSequenceClassification.from_pretrained(place)
    torch.testing.assert_close(goes_on.model.score.weight, kept.score.weight, rtol=0, atol=0)

    language = tiny_recipe()
    other = make_built(language)
    other.model.save_pretrained(tmp_path)
    made = [
        make_built(replace(recipe, model=replace(of_folder(tmp_path), head="score"),
                           weights="pretrained", seed=seed))
        for seed in (0, 0, 1)
    ]  # fmt: skip
    own = dict(other.model.named_parameters())
    for name, value in made[0].model.named_parameters():
        if name != "score.weight":
            torch.testing.assert_close(value, own[name], rtol=0, atol=0)
    one, same, third = (built.model.score.weight for built in made)
    assert one.abs().sum() > 0
    assert torch.equal(one, same)
    assert not torch.equal(one, third)


def test_a_killed_run_ends_with_the_same_bits(home, tmp_path):
    root, asked, recipe, _ = home
    recipe = replace(recipe, steps=4)
    train(recipe, asked, tmp_path / "whole", cadence=Cadence(save_every=2), cache=root / "cache")
    train(recipe, asked, tmp_path / "cut", cadence=Cadence(save_every=2), cache=root / "cache")
    for path in sorted((tmp_path / "cut" / "checkpoints").iterdir()):
        if path.name.endswith("4"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    train(recipe, asked, tmp_path / "cut", cadence=Cadence(save_every=2), cache=root / "cache")
    a, b = ((tmp_path / n / "model" / "model.safetensors").read_bytes() for n in ("whole", "cut"))
    assert a == b


def test_the_last_token_that_is_no_padding_is_scored(home):
    root, asked, recipe, _ = home
    data = read_data(asked, recipe.model, root / "cache")
    sampler, _ = build_samplers(asked, recipe, data)
    end, seen = data.tokenizer.end, []
    assert data.tokenizer.padding == end  # as a tokenizer without padding of its own has it
    for micro in sampler.sample(0):
        for ids, labels in zip(micro.input_ids, micro.labels, strict=True):
            (at,) = (labels != -100).nonzero()[0].tolist()
            assert labels[at] == ids[at]
            seen.append((at, int(ids[at + 1])))
    assert {after for _, after in seen} == {end}
    sampler.padding = None
    for micro, (at, _) in zip([sampler.sample(0)[0]], seen, strict=False):
        assert (micro.labels[0] != -100).nonzero()[0].tolist() == [at + 1]


def test_a_score_is_of_the_marked_token_alone():
    """And so is the slope: every other token's is 0."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 8, generator=random, dtype=torch.float64).requires_grad_()
    labels = torch.full((3, 5), -100)
    ends = torch.tensor([4, 0, 2])
    labels[range(3), ends] = 7
    head = torch.nn.Linear(8, 1, bias=False).double()
    expected = head(hidden[range(3), ends]).squeeze(1)
    (slope,) = torch.autograd.grad(expected.square().sum(), hidden)
    found = row_scores(head, hidden, labels)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), hidden)[0], slope, rtol=1e-5, atol=1e-6
    )


def test_every_family_with_a_classifier_builds_and_the_others_say_so():
    for family in families:
        model_type = families.find(family).name
        assert families.find(family).scored == (model_type in CLASSIFIERS), family
        if family not in CONFIGS:
            continue
        for method in ("full", "lora"):
            recipe = make_recipe(family, objective="reward", preference=SCORES, method=method)
            if families.find(family).scored:
                build_model(recipe, "meta")  # which compares it with what is declared
                continue
            with pytest.raises(InvalidRequest, match="no class of sequence classification"):
                build_model(recipe, "meta")


def test_a_frozen_models_head_is_trained_whatever_the_patterns():
    recipe = make_recipe(objective="reward", preference=SCORES, method="freeze")
    freeze = replace(recipe.freeze, last_blocks=0, patterns=("*.layers.0.*",))
    model = build_model(replace(recipe, freeze=freeze), "cpu")
    fill_weights(model, recipe)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert not any(".layers.1." in name for name in trained)


def test_it_is_planned_restated_and_certified(certified_here):
    task = Task(objective="reward", sequence_length=64, global_batch=8, steps=3)
    asked = Request(model=CONFIG, task=task, method="lora", hardware=Hardware(device="cpu"),
                    preference=PreferenceRequest(center=0.01))  # fmt: skip
    plan = api.plan(asked, levers=False)
    assert plan.recipe.preference == SCORES
    assert plan.recipe.model.head == "score"
    assert plan.recipe.loss == "plain"
    assert api.predict(restate(plan)).recipe.preference == SCORES
    turned = [dict(way) for way, _ in turn(read_problem(asked), plan.recipe)]
    assert not any("loss" in way for way in turned)
    made = certify(plan.recipe, find_device("cpu"), None)
    assert made.generation is None
    assert "generate" not in made.phases
    for phase in ("forward", "backward", "evaluate"):
        assert plan.ledger.total(Phase(phase)) == made.phases[phase]


REFUSED = {
    "chunked": ({"loss": "chunked"}, "makes one score of a row"),
    "a beta": ({"preference": PreferenceRequest(beta=0.2)}, "scores are rewards as they are"),
    "a reference": ({"preference": PreferenceRequest(reference="precomputed")}, "without a ref"),
    "another framework": (
        {"framework": "trl", "hardware": Hardware(device="h100-sxm")},
        "describes how it computes",
    ),
    "an adapter of the head": ({"method": "lora", "lora": ("score",)}, "matches no projection"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_go_with_is_refused(changes, said):
    task = Task(objective="reward", sequence_length=64, global_batch=8, steps=3)
    asked = Request(model=CONFIG, task=task, hardware=Hardware(device="cpu"))
    if isinstance(changes.get("lora"), tuple):
        changes = {**changes, "lora": replace(asked.lora, targets=changes["lora"])}
    with pytest.raises(InvalidRequest) as raised:
        api.plan(replace(asked, **changes), levers=False)
    assert said in raised.value.message


def test_a_margin_of_each_pair_is_refused_and_not_passed_over(home, tmp_path):
    root, asked, recipe, _ = home
    data = write_pairs(tmp_path / "margins.jsonl", margin=0.5)
    with pytest.raises(InvalidRequest, match=r"line 1.*`margin`"):
        read_data(replace(asked, task=replace(asked.task, data=data)), recipe.model, root / "cache")


def test_a_reward_model_writes_no_text(home):
    with pytest.raises(InvalidRequest, match="scores texts and writes none"):
        generate(home[0] / "run", "What")
