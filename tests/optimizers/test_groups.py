"""Groups of parameters: which decay, and which learn faster, as transformers and peft have it."""

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.optimizers import optimizers
from memfit.optimizers.shared.groups import RATE, set_rate, split_specs
from memfit.records import from_data
from memfit.records.recipe import Lora
from memfit.records.request import Request
from memfit.train.step.build import build_model, build_optimizer
from tiny_models import CONFIGS, make_recipe

DECAYING = {"weight_decay": 0.1, "decays": "matrices"}


@pytest.mark.parametrize("family", CONFIGS)
def test_what_decays_is_what_the_trainer_of_transformers_decays(family):
    config = AutoConfig.for_model(**CONFIGS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    weights = read_model(make_recipe(family).model).weights
    ours = {w.name for w in weights if w.spec.decays}
    assert ours == theirs & {w.name for w in weights}
    assert len(weights) == len(dict(model.named_parameters()))


@pytest.mark.parametrize("name", [n for n in optimizers if n != "adamwfp8"])
def test_every_optimizer_spares_norms_and_biases(name):
    """Gradients of 0: what moves, decays."""
    family = optimizers.find(name)
    ways = [i for i in family.implementations if i not in family.cuda_only]
    if not ways:
        pytest.skip("exists on CUDA only")
    settings = {"name": name, "implementation": ways[0], "learning_rate": 0.1, **DECAYING}
    recipe = make_recipe("qwen2", optimizer=settings)
    model = build_model(recipe, "cpu")
    named = dict(model.named_parameters())
    with torch.no_grad():
        for p in named.values():
            p.fill_(1.0)
            p.grad = torch.zeros_like(p)
    optimizer = build_optimizer(recipe, model)
    set_rate(optimizer, 0.1)
    optimizer.step()
    moved = {n for n, p in named.items() if not torch.equal(p, torch.ones_like(p))}
    assert moved == {n for n in named if "norm" not in n and "bias" not in n}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_rates_and_decays_of_lora_plus_are_pefts(method):
    targets = ("q_proj", "down_proj")
    settings = {"lora_plus": 16.0, "learning_rate": 1e-3, **DECAYING}
    recipe = make_recipe(
        "llama", method=method, lora=Lora(rank=4, alpha=8.0, targets=targets), optimizer=settings
    )
    model = build_model(recipe, "cpu")
    ours = build_optimizer(recipe, model)
    set_rate(ours, 1e-3)
    names = {p: n for n, p in model.named_parameters()}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["llama"]))
    config = LoraConfig(r=4, target_modules=list(targets), use_dora=method == "dora")
    wrapped = get_peft_model(plain, config)
    theirs = create_loraplus_optimizer(
        wrapped, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1
    )
    own = {p: n for n, p in wrapped.named_parameters()}

    def read(optimizer, names):
        return {
            names[p].replace(".default", ""): (group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
            for p in group["params"]
        }

    found, want = read(ours, names), read(theirs, own)
    assert found == want
    assert {rate for rate, _ in found.values()} == {1e-3, 16e-3}


def test_one_group_is_left_as_it_was():
    recipe = make_recipe("llama")
    specs = [w.spec for w in read_model(recipe.model).weights]
    assert split_specs(specs, recipe.optimizer) == [(specs, recipe.optimizer)]
    (group,) = build_optimizer(recipe, build_model(recipe, "cpu")).param_groups
    assert group[RATE] == 1.0


def test_a_recipe_that_says_nothing_of_groups_keeps_its_name():
    recipe = make_recipe("llama")
    assert recipe.optimizer.decays == "all"
    assert replace(recipe, optimizer=replace(recipe.optimizer, decays="matrices")).digest != (
        recipe.digest
    )


@pytest.mark.parametrize(
    ("keys", "decays"),
    [
        ({"weight_decay": 0.1}, "matrices"),
        ({"weight_decay": 0.1, "decays": "all"}, "all"),
        ({}, "all"),
    ],
)
def test_a_plan_decays_what_trainers_do_unless_all_is_asked_for(keys, decays):
    data = {
        "model": CONFIGS["llama"], "optimizer": keys, "hardware": {"device": "h100-sxm"},
        "task": {"sequence_length": 16, "global_batch": 2, "steps": 2},
    }  # fmt: skip
    made = api.plan(from_data(data, Request, source="a test"), levers=False)
    assert made.recipe.optimizer.decays == decays


def test_a_higher_rate_of_matrices_that_are_not_there_is_refused():
    with pytest.raises(InvalidRequest, match="`method: full` has no adapters"):
        build_model(make_recipe("llama", optimizer={"lora_plus": 4.0}), "cpu")
