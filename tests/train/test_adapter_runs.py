"""Whole runs of adapters: trained, spoken with, loaded by peft, merged, and spoken with again."""

import json
import warnings

import pytest
import torch
from peft import PeftModel
from tiny_runs import tiny_recipe, write_text
from transformers import AutoModelForCausalLM

from memfit import api
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora
from memfit.records.request import Request, Task
from memfit.train.run.generate import generate, load_model
from memfit.train.run.loop import train

TARGETS = ("q_proj", "down_proj")
RUNS = {
    "dora": {"method": "dora", "lora": Lora(rank=4, alpha=8.0, targets=TARGETS)},
    "rslora": {
        "method": "lora",
        "lora": Lora(rank=4, alpha=8.0, targets=TARGETS, scaling="rank-stabilised"),
    },
}


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 25)[None]).logits


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Text, and a base that memfit trained."""
    root = tmp_path_factory.mktemp("runs")
    data = write_text(tmp_path_factory.mktemp("text"))
    recipe = tiny_recipe(steps=3)
    request = Request(model=recipe.model.config, task=Task(data=str(data)))
    train(recipe, request, root / "base", cache=root / "cache")
    return root, data


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_speaks_and_merges_and_peft_reads_it(name, home):
    root, data = home
    base, run = root / "base" / "model", root / name
    config = json.loads((base / "config.json").read_text())
    model = ModelReference(name="base", source=str(base), config=config)
    recipe = tiny_recipe(steps=6, weights="pretrained", model=model, **RUNS[name])
    request = Request(model=str(base), task=Task(data=str(data)))
    train(recipe, request, run, cache=root / "cache")

    ours = load_model(run / "model")
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(ours), logits(plain)), "it learned something"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers renamed
        theirs = PeftModel.from_pretrained(plain, str(run / "model"))
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)

    made = api.merge(run, root / f"{name}-merged")
    assert (made.lost, made.base_differs) == (0.0, 0.0)
    merged = AutoModelForCausalLM.from_pretrained(root / f"{name}-merged")
    torch.testing.assert_close(logits(merged), logits(ours), rtol=1e-5, atol=1e-5)
    said = [generate(place, "the", 12, temperature=0) for place in (run, root / f"{name}-merged")]
    assert said[0] == said[1]
