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
from memfit.train.step.step import step
from tiny_models import CONFIGS, make_batch, make_built, make_recipe, targets_of

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


def falling_rates(model, rate, decay):
    """timm's rule (`param_groups_layer_decay`, after ELECTRA and BEiT), written out by name: layer
    0 is the embedding, layer n + 1 what stands behind the n blocks, each layer's rate the next
    one's times `decay`."""
    last = len(model.model.layers) + 1
    for name, parameter in model.named_parameters():
        layer = last
        if "embed" in name:
            layer = 0
        elif ".layers." in name:
            layer = int(name.split(".layers.")[1].split(".")[0]) + 1
        yield {"params": [parameter], "lr": rate * decay ** (last - layer),
               "weight_decay": 0.0 if "norm" in name else 0.1}  # fmt: skip


def test_rates_that_fall_with_the_layer_move_the_weights_as_torchs_own_groups_do():
    settings = {"layer_decay": 0.7, "learning_rate": 1e-2, "implementation": "fused", **DECAYING}
    recipe = make_recipe("llama", optimizer=settings)
    built = make_built(recipe)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["llama"]))
    plain.load_state_dict(built.model.state_dict())
    theirs = torch.optim.AdamW(falling_rates(plain, 1e-2, 0.7), betas=(0.9, 0.95), eps=1e-8)
    for seed in range(3):
        batch = make_batch(seed=seed)
        set_rate(built.optimizer, 1e-2)
        step(built, [batch], targets_of(batch))
        logits = plain(batch.input_ids).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        if recipe.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), recipe.optimizer.clip_norm)
        theirs.step()
        theirs.zero_grad()
    rates = {group[RATE] for group in built.optimizer.param_groups}
    layers = CONFIGS["llama"]["num_hidden_layers"]
    assert sorted(rates) == pytest.approx([0.7**depth for depth in reversed(range(layers + 2))])
    for name, weight in plain.named_parameters():
        mine = dict(built.model.named_parameters())[name]
        torch.testing.assert_close(mine, weight, rtol=1e-4, atol=1e-6)


def test_rates_that_fall_with_the_layer_are_of_fused_updates():
    settings = {"layer_decay": 0.7, "name": "sgd", "implementation": "loop"}
    recipe = make_recipe("llama", optimizer=settings)
    with pytest.raises(InvalidRequest, match=r"`optimizer.layer_decay: 0.7` with `sgd`, `loop`"):
        build_model(recipe, "cpu")
    data = {"model": CONFIGS["llama"], "framework": "trl", "optimizer": {"layer_decay": 0.7}}
    with pytest.raises(InvalidRequest, match="is of memfit's own step"):
        from_data(data, Request, source="a test")


def test_a_higher_rate_of_matrices_that_are_not_there_is_refused():
    with pytest.raises(InvalidRequest, match="`method: full` has no adapters"):
        build_model(make_recipe("llama", optimizer={"lora_plus": 4.0}), "cpu")
