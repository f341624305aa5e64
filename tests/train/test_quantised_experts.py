"""Experts in 4 bits against bitsandbytes' own functions, an expert at a time, and against the same
model with dense experts."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.families import read_model
from memfit.parallelism.limits import why_no_mesh
from memfit.records.ledger import Phase
from memfit.records.model import Weight
from memfit.records.recipe import Lora, Parallel, Quantisation
from memfit.train.model.quantised import Quantised, QuantisedExperts, quantised_modules
from memfit.train.step.build import Built, build_model, fill_weights
from memfit.train.step.step import step
from tiny_models import CONFIGS, gradients_in, make_batch, make_built, make_recipe, targets_of

with quiet_import():
    import bitsandbytes as bnb

CPU = catalog.find_device("cpu-x86")
# biases, routers and convolutions
UNCODED = ("_bias", ".mlp.gate.weight", ".router.weight", ".conv1d.weight")
SPARSE = [f for f in CONFIGS if read_model(make_recipe(f).model).architecture.experts.count]
OTHERS = set(SPARSE) - {"gpt_oss", "qwen3_moe", "deepseek_v3"}  # which share a class of experts
FAMILIES = [pytest.param(f, marks=pytest.mark.wide) if f in OTHERS else f for f in SPARSE]
FORMATS = {
    "nf4, double": ("nf4", Quantisation(double=True)),
    "nf4": ("nf4", Quantisation()),
    "fp4": ("fp4", Quantisation()),
}


def recipe_of(family, form="nf4, double", precision="fp32", **changes):
    base_format, own = FORMATS[form]
    return make_recipe(
        family, method="lora", base_format=base_format, precision=precision, quantisation=own,
        **changes,
    )  # fmt: skip


def experts_of(form="nf4", shape=(5, 48, 32)):
    """Dense experts of random weights, and the same quantised."""
    torch.manual_seed(0)
    dense = torch.randn(shape)
    made = QuantisedExperts(shape, recipe_of("qwen3_moe", form))
    for name, parameter in made.stored().items():
        made._parameters[name] = torch.nn.Parameter(
            torch.empty_like(parameter, device="cpu"), False
        )
    made.store(dense)
    return dense, made


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_each_expert_has_the_codes_that_bitsandbytes_gives_it_alone(form):
    dense, made = experts_of(form)
    codes = made.weight.view(len(dense), -1, 1)
    scales = made.factors().view(len(dense), -1)
    unpacked = made.dense()
    for expert, own_codes, own_scales, own in zip(dense, codes, scales, unpacked, strict=True):
        theirs, state = bnb.functional.quantize_4bit(expert, blocksize=64, quant_type=form)
        assert torch.equal(own_codes, theirs)
        assert torch.equal(own_scales, state.absmax)
        state.shape = torch.Size((1, expert.numel()))  # see `FourBits.dequantise`
        assert torch.equal(own, bnb.functional.dequantize_4bit(theirs, state).view_as(expert))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_products_and_gradients_are_those_of_each_expert(form, transposed):
    _, made = experts_of(form)
    dense = made.dense() if transposed else made.dense().mT
    ends = torch.tensor([3, 3, 10, 11, 16], dtype=torch.int32)  # nobody chose the second
    x = torch.randn(16, dense.shape[1], requires_grad=True)
    found = made.multiply(x, ends, transposed=transposed)
    slope = torch.randn_like(found)
    found.backward(slope)
    start = 0
    for expert, end in zip(dense, ends.tolist(), strict=True):
        rows = slice(start, end)
        torch.testing.assert_close(found[rows], x[rows] @ expert)
        torch.testing.assert_close(x.grad[rows], slope[rows] @ expert.T)
        start = end


def test_nothing_is_saved_but_where_groups_end():
    _, made = experts_of()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = torch.randn(16, 32, requires_grad=True)
        made.multiply(x, torch.tensor([4, 8, 10, 16, 16], dtype=torch.int32), transposed=False)
    assert [t.shape for t in saved] == [(5,)]


def dense_twin(built: Built, recipe) -> Built:
    """The same model with the weights that its codes stand for, in fp32."""
    plain = replace(recipe, base_format="fp32", quantisation=Quantisation())
    twin = make_built(plain)
    coded, base = quantised_modules(built.model), find_adapter(plain).base_parameters(twin.model)
    own = dict(built.model.named_parameters())
    with torch.no_grad():
        for name, parameter in base.items():
            if name in coded:
                parameter.copy_(coded[name].dense())
        for name, parameter in twin.model.named_parameters():
            if name in own and own[name].shape == parameter.shape:
                parameter.copy_(own[name])
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_coded_experts_learns_as_one_with_the_weights_they_stand_for(family):
    recipe = recipe_of(family)
    built, batch = make_built(recipe), make_batch()
    twin = dense_twin(built, recipe)
    ours, theirs = gradients_in(built), gradients_in(twin)
    a = step(built, [batch], targets_of(batch))
    b = step(twin, [batch], targets_of(batch))
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=0)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_projections_are_coded_and_routers_and_biases_are_not(family):
    recipe = recipe_of(family)
    model = build_model(recipe, "meta")
    coded = quantised_modules(model)
    shapes = {w.name: w.shape for w in read_model(recipe.model).weights if w.part == "block"}
    want = {name for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(UNCODED)}
    assert coded.keys() == want
    assert {type(m) for n, m in coded.items() if n.endswith("_proj")} == {QuantisedExperts}
    rows = find_adapter(recipe).adapt(read_model(recipe.model), recipe).weights
    stored = {name: spec.shape for row in rows for name, spec in row.stored.items()}
    assert stored == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_a_seed_gives_the_experts_that_it_gives_in_sixteen_bits():
    recipe = recipe_of("gpt_oss", precision="bf16")
    coded = quantised_modules(make_built(recipe).model)
    plain = replace(recipe, base_format="bf16", quantisation=Quantisation())
    model = make_built(plain).model
    base = find_adapter(plain).base_parameters(model)
    again = find_adapter(recipe).base_parameters(make_built(recipe).model)
    for name, module in coded.items():
        before = module.weight.clone()
        module.store(base[name].data)
        assert torch.equal(module.weight, before), name
    for name in base.keys() & again.keys() - coded.keys():
        assert torch.equal(base[name], again[name]), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_read_from_files_a_weight_of_a_layer_at_a_time(family, tmp_path):
    source = make_built(make_recipe(family, method="full", precision="bf16"))
    named = {n: p.detach() for n, p in source.model.named_parameters()}
    save_file(named, tmp_path / "model.safetensors")
    recipe = recipe_of(family, precision="bf16")
    recipe = replace(
        recipe, weights="pretrained", model=replace(recipe.model, source=str(tmp_path))
    )
    model = build_model(recipe, "cpu")
    alive: list[int] = []
    put = Quantised.store

    def store(module: Quantised, dense: torch.Tensor) -> None:
        alive.append(dense.nbytes)
        put(module, dense)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantised, "store", store)
        fill_weights(model, recipe)
    assert max(alive) == max(w.numel for w in coded_rows(recipe)) * 2
    base, coded = find_adapter(recipe).base_parameters(model), quantised_modules(model)
    for name, module in coded.items():
        own = module.dense().float()
        assert (own - named[name].float()).norm() < 0.2 * named[name].float().norm(), name
    for name in base.keys() & named.keys() - coded.keys():
        assert torch.equal(base[name], named[name]), name


def coded_rows(recipe) -> list[Weight]:
    return [
        w for w in find_adapter(recipe).adapt(read_model(recipe.model), recipe).weights if w.coding
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_experts_are_a_quarter_and_their_scales(family):
    recipe = recipe_of(family, "nf4")
    rows = [w for w in coded_rows(recipe) if w.routed]
    assert rows
    for row in rows:
        assert row.nbytes == row.numel // 2 + 4 * (row.numel // 64)
    held = trace(recipe, CPU).ledger.by_kind(Phase.LOAD)
    dense = trace(replace(recipe, base_format="fp32", quantisation=Quantisation()), CPU)
    saved = sum(w.numel * 4 - w.nbytes for w in coded_rows(recipe))
    assert sum(dense.ledger.by_kind(Phase.LOAD).values()) - sum(held.values()) == pytest.approx(
        saved, abs=max(w.numel for w in coded_rows(recipe)) * 8
    )


def test_int8_codes_no_experts_and_says_what_does():
    recipe = make_recipe("mixtral", method="lora", base_format="int8", precision="bf16")
    with pytest.raises(InvalidRequest, match="3-D parameter") as caught:
        find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    assert "`base_format: nf4`" in caught.value.hint


def test_more_weights_than_bitsandbytes_counts_are_refused():
    config = CONFIGS["mixtral"] | {"hidden_size": 8192, "intermediate_size": 32768}
    recipe = recipe_of("mixtral", config=config, lora=Lora(rank=4, targets=("q_proj",)))
    model = read_model(recipe.model)
    with pytest.raises(InvalidRequest, match="2,147,483,648 weights"):
        find_adapter(recipe).adapt(model, recipe)


def test_experts_in_codes_are_not_dealt_to_ranks():
    recipe = recipe_of("mixtral", parallel=Parallel(dp_shard=2, ep=2))
    refused = why_no_mesh(recipe, "mixtral", read_model(recipe.model).architecture)
    assert refused
    assert "not built for experts of other ranks" in refused[0]
