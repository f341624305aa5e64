"""LoRA, rsLoRA and DoRA: against the base, against peft's own layers, and bit by bit."""

import hashlib
import warnings

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from transformers import AutoConfig, AutoModelForCausalLM

from memfit import catalog
from memfit.adapters import dora, find_adapter
from memfit.certify.tracing import trace_step
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.records.recipe import Lora, Parallel
from memfit.train.checkpoint.export import _save_adapter
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import step
from tiny_models import (
    PRECISIONS,
    TARGETS,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
)

STABLE = Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), scaling="rank-stabilised")
METHODS = {  # name -> what a recipe says
    "lora": {"method": "lora"},
    "rslora": {"method": "lora", "lora": STABLE},
    "dora": {"method": "dora"},
    "dora, rank-stabilised": {"method": "dora", "lora": STABLE},
}
BIASED = ("qwen2", "gpt2", "gpt_neox")  # projections with a bias; GPT-2's are stored transposed


def recipe_of(name, family="llama", **changes):
    changes = {**METHODS[name], **changes}
    targets = TARGETS.get(family, ("q_proj", "v_proj"))
    changes.setdefault("lora", Lora(rank=4, alpha=8.0, targets=targets))
    if family != "llama":
        changes["lora"] = replace(changes["lora"], targets=targets)
    return make_recipe(family, **changes)


def autocast(recipe):
    return torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast, cache_enabled=False)


def logits(built, model=None):
    with torch.no_grad(), autocast(built.recipe):
        model = (model or built.model).eval()
        made = model(input_ids=make_batch().input_ids, use_cache=False).logits
        built.model.train()
        return made


def build(recipe) -> Built:
    """With biases that are not zero, as Hugging Face starts them."""
    built = make_built(recipe)
    random = torch.Generator().manual_seed(3)
    for name, parameter in built.model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(0, 0.1, generator=random)
    return built


def train(built, steps=3):
    for seed in range(steps):
        batch = make_batch(seed=seed)
        step(built, [batch], targets_of(batch))
    return built


def trained(name, family="llama", **changes):
    return train(build(recipe_of(name, family, **changes)))


# --- 8: nothing at the start, nothing when switched off, the same when merged -------------------


def away_from_the_base_at_start(name="dora", family="llama", **changes):
    """Entries of the logits that differ from the base's."""
    built = build(recipe_of(name, family, **changes))
    with built.model.disable_adapter():
        base = logits(built)
    return int((logits(built) != base).sum())


def away_from_the_base_when_off(name="dora", family="llama", **changes):
    """The same after training, the adapter switched off."""
    built = build(recipe_of(name, family, **changes))
    with built.model.disable_adapter():
        base = logits(built)
    train(built)
    assert not torch.equal(logits(built), base), "it learned nothing"
    with built.model.disable_adapter():
        return int((logits(built) != base).sum())


def away_from_the_merged(name="dora", family="llama", **changes):
    """The largest difference of logits, adapter on against peft's merge, over the largest logit."""
    built = trained(name, family, **changes)
    on = logits(built)
    merged = built.model.merge_and_unload(safe_merge=True)
    return float((logits(built, merged) - on).abs().max() / on.abs().max())


@pytest.mark.covering(METHODS)
@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("family", ["llama", *BIASED])
@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_at_start_and_switched_off_is_the_base(name, family, precision, base_format):
    changes = {"precision": precision, "base_format": base_format}
    assert away_from_the_base_at_start(name, family, **changes) == 0
    assert away_from_the_base_when_off(name, family, **changes) == 0


@pytest.mark.covering(METHODS)
@pytest.mark.parametrize("family", ["llama", *BIASED])
@pytest.mark.parametrize("name", METHODS)
def test_merged_by_peft_is_the_adapter_switched_on(name, family):
    assert away_from_the_merged(name, family) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_merged_in_bf16_is_the_adapter_up_to_its_rounding(name):
    assert away_from_the_merged(name, precision="bf16", base_format="bf16") < 2e-2


# --- 9: what is frozen stays, and dtypes are the same in plan, certificate and run ---------------


def changed_while_frozen(name="dora", **changes):
    """How many frozen tensors have another hash after three steps."""
    built = build(recipe_of(name, **changes))

    def hashes():
        return {
            n: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
            for n, p in built.model.named_parameters()
            if not p.requires_grad
        }

    before = hashes()
    train(built)
    after = hashes()
    return sum(after[n] != h for n, h in before.items())


@pytest.mark.covering(METHODS)
@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_frozen_tensors_have_the_same_hash_after_training(name, precision, base_format):
    assert changed_while_frozen(name, precision=precision, base_format=base_format) == 0


def censuses(recipe, monkeypatch):
    """(name -> dtype, trained) in the plan, in the certificate's trace, and in the run."""
    planned = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    seen = {}
    register = trace_step.Recorder.register_model

    def look(self, model):
        seen.update(census(model))
        return register(self, model)

    monkeypatch.setattr(trace_step.Recorder, "register_model", look)
    device = catalog.find_device("h100-sxm")
    trace_step.trace_step(replace(recipe, device=device.id, attention="math"), device)
    run = census(train(build(recipe), 1).model)
    return {w.name: (w.dtype, w.trainable) for w in planned.weights}, seen, run


def census(model):
    return {
        n: (str(p.dtype).removeprefix("torch."), p.requires_grad)
        for n, p in model.named_parameters()
    }


@pytest.mark.covering(METHODS)
@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_dtypes_are_equal_in_plan_certificate_and_run(name, precision, base_format, monkeypatch):
    recipe = recipe_of(name, precision=precision, base_format=base_format)
    plan, certificate, run = censuses(recipe, monkeypatch)
    assert plan == certificate == run
    assert {dtype for dtype, is_trained in plan.values() if is_trained} == {recipe.trainable_dtype}


# --- DoRA's forward is peft's -----------------------------------------------------------------


def away_from_pefts_dora(family="llama", **changes):
    """Loss and gradients: the largest relative difference from the forward that peft has."""
    recipe = recipe_of("dora", family, **changes)
    batch = make_batch()
    found = []
    for of_peft in (False, True):
        built = trained("dora", family, **changes)  # magnitudes and B have moved
        for layer in built.model.modules():
            if of_peft and isinstance(layer, LoraLayer):
                layer.lora_variant["default"] = DoraLinearVariant()
        gradients = gradients_in(built)
        with autocast(recipe):
            logits_made = logits(built)
        step(built, [batch], targets_of(batch))
        found.append({**gradients, "logits": logits_made})
    ours, theirs = found
    assert any("magnitude" in name for name in ours)
    return max(float((ours[n] - t).norm() / t.norm()) for n, t in theirs.items())


@pytest.mark.parametrize("family", ["llama", *BIASED])
def test_doras_forward_and_gradients_are_pefts(family):
    assert away_from_pefts_dora(family) < 1e-5


def test_in_mixed_precision_doras_forward_is_about_pefts():
    changes = {"precision": "bf16-mixed", "base_format": "bf16"}
    assert away_from_pefts_dora(**changes) < 3e-2


def test_a_step_of_dora_makes_no_square_matrix_of_the_inputs():
    """peft's forward multiplies the adapter with an identity of (in, in): 205 MB at 7168."""
    from memfit.train.measure.live import LiveBytes

    lora = Lora(rank=4, alpha=8.0, targets=("down_proj",))
    built, batch = build(recipe_of("dora", lora=lora)), make_batch()
    live = LiveBytes("cpu")
    live.register_model(built.model)
    with live:
        step(built, [batch], targets_of(batch), live.enter)
    assert not [b for b in live.blocks if b.nbytes == 80 * 80 * 4]
    assert [b for b in live.blocks if b.nbytes == 80 * 32 * 4], "the sum of weight and adapter"


def test_dora_on_many_ranks_is_refused_while_fsdp_gathers_magnitudes_in_bf16():
    alone = replace(recipe_of("dora"), parallel=Parallel(dp_shard=2))
    find_adapter(alone).adapt(read_model(alone.model), alone)  # gathered in fp32
    recipe = replace(alone, precision="bf16-mixed")
    with pytest.raises(InvalidRequest, match="on 2 ranks") as caught:
        find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    assert "precision: fp32" in caught.value.hint
    # the reason: a magnitude that grew by 0.1 % is the old one in bf16
    norm = torch.tensor(1.5)
    assert (norm * 1.001).bfloat16() == norm.bfloat16()


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_peft_loads_the_saved_adapter_and_says_the_same(name, tmp_path):
    built = trained(name)
    _save_adapter(tmp_path, built)
    with built.model.disable_adapter():
        base = find_adapter(built.recipe).base_parameters(built.model)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**built.recipe.model.config))
    theirs.load_state_dict({n: p.detach() for n, p in base.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers renamed
        loaded = PeftModel.from_pretrained(theirs, str(tmp_path))
    torch.testing.assert_close(logits(built, loaded), logits(built), rtol=1e-5, atol=1e-5)
    said = loaded.peft_config["default"]
    assert said.use_dora == (built.recipe.method == "dora")
    assert said.use_rslora == (built.recipe.lora.scaling == "rank-stabilised")


def test_rank_stabilised_scaling_divides_by_the_root_of_the_rank():
    lora = Lora(rank=16, alpha=8.0, targets=("q_proj",))
    assert (lora.factor, replace(lora, scaling="rank-stabilised").factor) == (0.5, 2.0)
    for scaling, factor in (("plain", 0.5), ("rank-stabilised", 2.0)):
        recipe = recipe_of("lora", lora=replace(lora, scaling=scaling))
        layers = [m for m in build_model(recipe, "meta").modules() if isinstance(m, LoraLayer)]
        assert {layer.scaling["default"] for layer in layers} == {factor}


# --- each of these checks fails on the fault that it is there for --------------------------------


def leave_the_magnitudes_at_one(patch):
    patch.setattr(dora, "row_norms", lambda layer, name: layer.lora_magnitude_vector[name].weight)
    one = torch.nn.init.ones_
    reset = dora.peft_layers.reset
    patch.setattr(
        dora.peft_layers, "reset",
        lambda module, rows, also=None: reset(
            module, rows, lambda layer, name: one(layer.lora_magnitude_vector[name].weight.data)
        ),
    )  # fmt: skip


def forget_the_bias(patch):
    """It is scaled with the rest."""

    class Variant:
        def forward(self, module, active_adapter, x, result, **_):
            magnitude = module.lora_magnitude_vector[active_adapter].weight
            ratio = magnitude / dora.row_norms(module, active_adapter)
            added = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
            return (result + added * module.scaling[active_adapter]) * ratio

    patch.setattr(dora, "_variant", Variant)


def forget_the_adapter_in_the_norm(patch):
    def of_the_base(layer, name):
        weight = layer.get_base_layer().weight.detach()
        return torch.linalg.vector_norm(weight, dim=0 if layer.fan_in_fan_out else 1)

    patch.setattr(dora, "row_norms", of_the_base)


def start_b_at_random(patch):
    def random(self, name, init_lora_weights):
        torch.nn.init.normal_(self.lora_A[name].weight)
        torch.nn.init.normal_(self.lora_B[name].weight)

    patch.setattr(LoraLayer, "reset_lora_parameters", random)


def train_the_base(patch):
    made = build_optimizer

    def all_of_it(recipe, model):
        optimizer = made(recipe, model)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        with torch.no_grad():
            for p in frozen:
                p.grad = torch.ones_like(p)
        optimizer.add_param_group({"params": frozen})
        return optimizer

    patch.setattr("tiny_models.build_optimizer", all_of_it)


def leave_the_adapter_on(patch):
    from contextlib import nullcontext

    patch.setattr(PeftModel, "disable_adapter", lambda self: nullcontext())


MUTATIONS = [
    (away_from_pefts_dora, {}, leave_the_magnitudes_at_one),
    (away_from_pefts_dora, {"family": "qwen2"}, forget_the_bias),
    (away_from_pefts_dora, {}, forget_the_adapter_in_the_norm),
    (away_from_the_merged, {}, forget_the_adapter_in_the_norm),
    (away_from_the_base_at_start, {"name": "lora"}, start_b_at_random),
    (away_from_the_base_at_start, {}, start_b_at_random),
    (away_from_the_base_when_off, {}, leave_the_adapter_on),
    (changed_while_frozen, {}, train_the_base),
]


@pytest.mark.parametrize(
    ("check", "asked", "fault"), MUTATIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_fault_is_found(check, asked, fault, monkeypatch):
    assert check(**asked) < 1e-5
    fault(monkeypatch)
    assert check(**asked) > 1e-4


def test_the_census_sees_an_adapter_in_another_dtype(monkeypatch):
    """peft's own trap: adapters of a 16-bit base that are fp32 whatever was asked for."""
    recipe = recipe_of("lora", precision="bf16", base_format="bf16")
    monkeypatch.setattr(
        "memfit.adapters.shared.peft_layers.apply_rows", lambda module, rows: module
    )
    with pytest.raises(ValueError, match="is declared as"):
        Built(recipe, build_model(recipe, "meta"), None)
