"""Lean blocks: the same mathematics with less kept, held against Hugging Face's own classes."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.autograd import gradcheck
from transformers import AutoConfig, AutoModelForCausalLM

from memfit.core.errors import InvalidRequest
from memfit.families import families_that, read_model
from memfit.families.capabilities.lean import check_lean, find_lean
from memfit.plan.request.problem import first_recipe, read_problem
from memfit.records import from_data
from memfit.records.recipe import LEAN
from memfit.records.request import Request
from memfit.train.lean import activations, norms, products
from memfit.train.lean.made import Made, Shared, find
from memfit.train.step.step import step
from tiny_models import (
    CONFIGS,
    FAMILIES,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
    textbook,
)

NO_CLIP = {"clip_norm": 0.0}


def gradients_of(recipe, batch, weights=None):
    """Loss, gradients and the weights of one step."""
    built = make_built(recipe)
    if weights is not None:
        built.model.load_state_dict(weights)
    weights = {k: v.clone() for k, v in built.model.state_dict().items()}
    gradients = gradients_in(built)
    result = step(built, [batch], targets_of(batch))
    return result.loss, gradients, weights


def worst(found, expected) -> float:
    """The largest error of a gradient, relative to its tensor's largest element."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - expected[name].double()).abs().max())
        / float(expected[name].double().abs().max().clamp_min(1e-3))
        for name in found
    )


# Two orders of the same sums in fp32 round differently, by how much depends on the processor's
# kernels; both are held to fp64. A wrong formula is off by thousands of times more.
ROUNDING = 3


def errors_in_fp32(family: str = "llama", **changes: Any) -> tuple[float, float]:
    """Errors against fp64 of lean gradients and of Hugging Face's in fp32, eager attention in all;
    the loss's error is among them."""
    recipe = make_recipe(family, attention="math", optimizer=NO_CLIP, **changes)
    recipe = replace(recipe, lean=find_lean(read_model(recipe.model).architecture))
    batch = make_batch(ignored=5)
    loss, gradients, weights = gradients_of(recipe, batch)
    exact_loss, exact = textbook(recipe, weights, batch, torch.float64)
    their_loss, theirs = textbook(recipe, weights, batch)

    def error(loss, gradients):
        return max(worst(gradients, exact), abs(float(loss) / float(exact_loss) - 1))

    return error(loss, gradients), error(their_loss, theirs)


@pytest.mark.parametrize("family", families_that("lean"))
def test_gradients_in_fp32_are_those_of_hugging_face(family):
    own, theirs = errors_in_fp32(family)
    assert own < ROUNDING * theirs


@pytest.mark.parametrize("operation", LEAN)
@pytest.mark.parametrize("changes", [{}, {"method": "lora"}, {"recompute_blocks": 2}])
def test_each_operation_alone_gives_the_same_gradients(operation, changes):
    batch = make_batch(ignored=5)
    recipe = make_recipe(optimizer=NO_CLIP, **changes)
    loss, expected, weights = gradients_of(recipe, batch)
    lean_loss, gradients, _ = gradients_of(replace(recipe, lean=(operation,)), batch, weights)
    assert torch.equal(lean_loss, loss)  # the same kernels in the same order of rounding
    _, theirs = errors_in_fp32()
    assert worst(gradients, expected) < 2 * ROUNDING * theirs  # neither of the two is exact


@pytest.mark.parametrize("changes", [{}, {"method": "lora"}])
def test_recomputed_lean_blocks_give_bit_equal_gradients(changes):
    batch = make_batch()
    recipe = make_recipe(lean=LEAN, optimizer=NO_CLIP, **changes)
    loss, gradients, weights = gradients_of(recipe, batch)
    again, repeated, _ = gradients_of(replace(recipe, recompute_blocks=3), batch, weights)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], repeated[name]) for name in gradients)


WIDE = {**CONFIGS["llama"], "hidden_size": 128, "intermediate_size": 344}


def exact_gradients(weights, batch):
    """In fp64, by Hugging Face's class."""
    config = AutoConfig.for_model(**WIDE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    model.load_state_dict(weights)
    labels = torch.full_like(batch.labels, -100)
    labels[:, 1:] = batch.labels[:, :-1]
    model.train()(input_ids=batch.input_ids, labels=labels, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def relative(found, exact) -> float:
    """The mean over tensors of |error| / |exact|."""
    errors = [float((found[n].double() - g).norm() / g.norm()) for n, g in exact.items()]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_the_error_of_bf16_is_not_above_hugging_faces(precision):
    """Against fp64, over five draws of weights and tokens.

    Under autocast both run the same 16-bit kernels on the same numbers, and fp32 sums in another
    order turn a single rounding over here and there: a few per mille either way.
    """
    own = theirs = 0.0
    base = {"bf16": "bf16"}.get(precision, "fp32")
    recipe = make_recipe(config=WIDE, precision=precision, base_format=base, optimizer=NO_CLIP)
    for seed in range(5):
        batch = make_batch(4, 32, seed=seed)
        draw = replace(recipe, seed=seed)
        _, plain, weights = gradients_of(draw, batch)
        _, lean, _ = gradients_of(replace(draw, lean=LEAN), batch, weights)
        exact = exact_gradients(weights, batch)
        own, theirs = own + relative(lean, exact), theirs + relative(plain, exact)
    assert own <= theirs * (1 if precision == "bf16" else 1.003)


RANDOM = torch.Generator().manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    """Other numbers at each call of a check, the same in each run."""
    return torch.randn(*shape, dtype=torch.float64, generator=RANDOM).requires_grad_()


def check_norm() -> bool:
    def normed(x, w):
        return [norms.RmsNorm.apply(x, w, 1e-6, kind)[0] for kind in KINDS]

    return gradcheck(normed, (draw(2, 3, 8), draw(8)), **QUIET)


KINDS = norms.normalise, norms.normalise_wide, norms.normalise_unit


def check_layer_norm() -> bool:
    def normed(x, w, b):
        return norms.LayerNorm.apply(x, w, b, 1e-6), norms.LayerNorm.apply(x, w, None, 1e-6)

    return gradcheck(normed, (draw(2, 3, 8), draw(8), draw(8)), **QUIET)


def check_activation() -> bool:
    def curves(x):
        return [activations.Activation.apply(x, name) for name in activations.CURVES]

    return gradcheck(curves, (draw(2, 3, 5),), **QUIET)


def check_product() -> bool:
    product = partial(activations.GatedProduct.apply)
    return all(
        gradcheck(lambda a, b, n=n: product(a, b, n), (draw(2, 3, 5), draw(2, 3, 5)), **QUIET)
        for n in ("silu", "gelu")
    )


def check_joined() -> bool:
    """A norm that feeds two linears, and a product that feeds one, all made again."""

    def block(x, w, first, second, bias, last):
        out, inverse = norms.RmsNorm.apply(x, w, 1e-6, norms.normalise)
        made = Made(norms.normalise, (x, inverse, w), Shared())
        gates = products.Linear.apply(out, first, bias, made, False)
        up = products.Linear.apply(out, second, None, made, False)
        product = activations.GatedProduct.apply(gates, up, "silu")
        made = Made(partial(activations.gate, "silu"), (gates, up), Shared())
        return products.Linear.apply(product, last, None, made, False)

    weights = draw(6, 8), draw(6, 8), draw(6), draw(8, 6)
    return gradcheck(block, (draw(2, 3, 8), draw(8), *weights), **QUIET)


def check_turned() -> bool:
    """GPT-2's block: a LayerNorm, and weights that are stored the other way round."""

    def block(x, w, b, first, bias, last):
        out = norms.LayerNorm.apply(x, w, b, 1e-6)
        made = Made(partial(norms.normalise_rows, eps=1e-6), (x, w, b), Shared())
        wide = products.Linear.apply(out, first, bias, made, True)
        bent = activations.Activation.apply(wide, "gelu_new")
        made = Made(activations.CURVES["gelu_new"].value, (wide,), Shared())
        return products.Linear.apply(bent, last, None, made, True)

    weights = draw(8), draw(8), draw(8, 6), draw(6), draw(6, 8)
    return gradcheck(block, (draw(2, 3, 8), *weights), **QUIET)


QUIET = {"raise_exception": False, "check_undefined_grad": False}
CHECKS = {
    "norm": check_norm, "layer norm": check_layer_norm, "activation": check_activation,
    "product": check_product, "joined": check_joined, "turned": check_turned,
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_derivatives_in_fp64(check):
    assert check()


# A fault -> (function, line, the line with the fault), and the checks that must see it.
MUTATIONS = {
    "the mean is forgotten": (
        norms.RmsNorm, "mul_((slope * wide).mean(-1, keepdim=True))", "mul_(0)", check_norm),
    "the weight is forgotten": (
        norms.RmsNorm, "factor = weight.to(wide.dtype)", "factor = torch.ones(8)", check_norm),
    "the unit is forgotten": (
        norms.RmsNorm, "1 + factor if ctx.unit else factor", "factor", check_norm),
    "the deviations for the means": (
        norms.LayerNorm, "mean, deviation, weight.to", "deviation, mean, weight.to",
        check_layer_norm),
    "the other layout's gradient": (
        products.Linear, "rows.t() @ flat if ctx.turned", "(flat.t() @ rows).t() * 2 if ctx.turned",
        check_turned),
    "a slope of the result": (
        activations.Activation, "slope(grad, x)", "slope(grad, ctx.curve.value(x))",
        check_activation),
    "the weight's gradient without the norm": (
        norms.RmsNorm, "_sum_rows(grad * wide)", "_sum_rows(grad * x)", check_norm),
    "gate for up": (
        activations.GatedProduct, "slope(grad * up, gates)", "slope(grad * gates, gates)",
        check_product),
    "a product of what was not made again": (
        products.Linear, "ctx.shared.take(ctx.remake, parts, grad.dtype)", "parts[0]",
        check_joined),
    "a bias without its gradient": (
        products.Linear, "flat.sum(0) if of_bias", "flat.sum(0) * 0 if of_bias", check_joined),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_fault_is_seen(name, monkeypatch):
    owner, old, new, check = MUTATIONS[name]
    source = inspect.getsource(owner.backward)
    assert source.count(old) == 1
    scope: dict[str, Any] = {}
    body = "from __future__ import annotations\nclass Faulty:\n" + source.replace(old, new)
    exec(
        body, vars(sys.modules[owner.__module__]).copy(), scope
    )  # the same code with one line changed
    monkeypatch.setattr(owner, "backward", staticmethod(scope["Faulty"].backward))
    assert not check()


def test_only_a_tensor_itself_knows_what_it_was_made_of():
    built = make_built(make_recipe(lean=LEAN))
    norm = built.model.model.layers[0].input_layernorm
    out = norm(torch.randn(1, 2, 32))
    assert find(out) is not None
    assert find(out[:, :1]) is None
    assert find(built.model.model.norm(torch.randn(1, 2, 32))) is None


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in families_that("lean")])
def test_other_families_are_refused(family):
    a = read_model(make_recipe(family).model).architecture
    assert find_lean(a) == ()
    check_lean(family, a, ())
    with pytest.raises(InvalidRequest, match=family):
        check_lean(family, a, LEAN)


def test_another_activation_leaves_the_norm():
    a = read_model(
        make_recipe(config={**CONFIGS["llama"], "hidden_act": "relu"}).model
    ).architecture
    assert find_lean(a) == ("norm",)
    with pytest.raises(InvalidRequest, match=r"that of `m`, `relu`, keeps its result alone"):
        check_lean("m", a, LEAN)


def test_relu_keeps_one_tensor_and_gelu_two():
    """Why relu has no lean operation: what its derivative reads, the next product reads too."""

    def kept(curve):
        seen: set[int] = set()

        def pack(t):
            seen.add(t.data_ptr())
            return t

        x = torch.randn(4, 8, requires_grad=True) * 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            made = curve(x)
            made @ torch.randn(8, 8, requires_grad=True).detach().requires_grad_()
        return len(seen & {x.data_ptr(), made.data_ptr()})

    assert (kept(torch.relu), kept(torch.nn.functional.gelu)) == (1, 2)


def test_a_request_names_all_operations_or_some():
    def recipe(lean):
        asked = {"model": "llama-2-7b", "lean": lean, "hardware": {"device": "h100-sxm"}}
        request = from_data(asked, Request, source="test")
        return first_recipe(read_problem(request), method="full", precision="bf16")

    assert recipe("none").lean == ()
    assert recipe("auto").lean == recipe("all").lean == LEAN
    assert recipe(["mlp", "norm"]).lean == LEAN
    assert recipe(["mlp"]).lean == ("mlp",)
    assert recipe("none").digest != recipe("all").digest
    with pytest.raises(InvalidRequest, match="lean"):
        recipe("some")
    with pytest.raises(InvalidRequest, match="written for blocks of one feed-forward"):
        read_problem(Request(model="mixtral-8x7b", lean="all"))
    with pytest.raises(InvalidRequest, match="memfit's own step"):
        Request(model="llama-2-7b", framework="megatron", lean="all")
    left = Request(model="mixtral-8x7b", lean="auto")
    assert first_recipe(read_problem(left), method="full", precision="fp32").lean == ()
