"""Products of blocks in FP8: which they are, how exact, what they hold, and where they are refused.

torch multiplies in FP8 on CUDA alone; on this CPU torchao emulates: the same rounding, then a
product in fp32.
"""

import pytest
import torch
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8.float8_linear import Float8Linear

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.families.capabilities.float8 import check_device
from memfit.meta.layers import float8 as declared
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.step_time.block import around
from memfit.plan.step_time.predicted_time import count_work, find_setting, sum_up
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request
from memfit.train.model import float8
from memfit.train.model.weights import fill_weights
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import step
from tiny_models import gradients_in, make_batch, make_built, make_recipe, targets_of

# torchao asks torch for autocast's dtype by an older name
pytestmark = pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")
H100 = catalog.find_device("h100-sxm")
FP8 = {"precision": "fp8-mixed", "packing": True}


def recipe_of(family="llama", **changes):
    return make_recipe(family, **{**FP8, "device": H100.id, **changes})


@pytest.fixture
def emulated(monkeypatch):
    """On this CPU: torchao's own emulation, and memfit's refusal of a CPU out of the way."""
    made = float8.narrow
    monkeypatch.setattr(float8, "narrow", lambda model, recipe: made(model, recipe, emulate=True))
    monkeypatch.setattr(float8, "check_device", lambda *_: None)


def build(**changes):
    recipe = make_recipe(**{**FP8, **changes})
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    return Built(recipe, model, build_optimizer(recipe, model))


def narrowed():
    """Names of the modules whose products are in FP8."""
    model = build_model(recipe_of(), "meta")
    return {n for n, m in model.named_modules() if isinstance(m, Float8Linear)}


def away_from_fp32():
    """Loss and gradients, the emulated step against fp32's: largest relative difference."""
    batch, found = make_batch(), []
    for built in (build(), make_built(make_recipe())):
        gradients = gradients_in(built)
        loss = step(built, [batch], targets_of(batch)).loss
        found.append({**gradients, "loss": loss})
    ours, exact = found
    return max(float((ours[n] - e).norm() / e.norm()) for n, e in exact.items())


def away_from_the_trace(family="llama", **changes):
    """Bytes of tensors by kind, predicted minus certified, over the phases of a micro-batch."""
    recipe = recipe_of(family, **changes)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger, traced = predict_memory(model, recipe, H100), trace(recipe, H100)
    off = 0
    for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.EVALUATE):
        want, have = traced.ledger.by_kind(phase), ledger.by_kind(phase)
        for kind in (want.keys() | have.keys()) - {Kind.FRAGMENTATION}:
            off += abs(have.get(kind, 0) - want.get(kind, 0))
    return off


def test_projections_of_the_blocks_are_narrow_and_the_head_is_not():
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj")
    names = {f"model.layers.{i}.self_attn.{leaf}" for i in range(3) for leaf in leaves}
    names |= {f"model.layers.{i}.mlp.{p}_proj" for i in range(3) for p in ("gate", "up", "down")}
    assert narrowed() == names


def test_a_step_in_fp8_is_a_step_in_fp32_within_its_rounding(emulated):
    """e4m3 has 3 bits of mantissa: 6 % a number at most, and sums average it out."""
    assert 1e-3 < away_from_fp32() < 0.25


def test_training_in_fp8_learns_as_bf16_does(emulated):
    losses = {}
    for precision in ("fp8-mixed", "bf16-mixed"):
        built = build(precision=precision)
        batch = make_batch()
        for _ in range(30):
            loss = step(built, [batch], targets_of(batch)).loss
        losses[precision] = float(loss)
    assert losses["fp8-mixed"] < 0.5
    assert losses["fp8-mixed"] == pytest.approx(losses["bf16-mixed"], rel=0.25, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_blocks": 2, "loss": "chunked", "loss_chunk": 16},
        {"family": "qwen2", "recompute_blocks": 1},
        {"family": "qwen3", "attention": "efficient"},
        {"family": "phi3"},
    ],
)
def test_the_prediction_is_the_certificate_to_the_byte(changes):
    assert away_from_the_trace(**changes) == 0


def test_all_products_are_counted():
    """Three a projection, as in bf16: FP8 changes how fast they are, not how many."""
    counted = {}
    for precision in ("fp8-mixed", "bf16-mixed"):
        recipe = recipe_of(precision=precision)
        model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
        counted[precision] = count_work(sum_up(model), recipe).hardware
    assert counted["fp8-mixed"] == counted["bf16-mixed"]


def test_casts_without_a_compiler_take_more_time_than_fused_ones():
    recipe = recipe_of()
    totals = sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe))
    ours = find_setting(totals, recipe, H100)
    fused = ours._replace(
        layout=ours.layout._replace(numbers=ours.layout.numbers._replace(narrow=1.0, recast=0.0))
    )
    assert around(ours).casts == pytest.approx(11 * around(fused).casts)
    weights = sum(totals.dense) / 3
    assert around(ours).unpacking > 33 * weights / H100.bandwidth
    wide = find_setting(totals, replace(recipe, precision="bf16-mixed"), H100)
    assert ours.machine != wide.machine, "products are as fast as the device's FP8"


def request(**changes):
    stated = {
        "model": "llama-3.2-1b", "weights": "random", "method": "full", "precision": "fp8-mixed",
        "task": {"sequence_length": 512, "global_batch": 4}, "hardware": {"device": "h100-sxm"},
    }  # fmt: skip
    return from_data({**stated, **changes}, Request, source="a test")


def test_a_plan_in_fp8_fits_and_says_so():
    plan = api.plan(request(), levers=False)
    assert plan.recipe.precision == "fp8-mixed"
    assert plan.recipe.selective_blocks == 0
    assert plan.recipe.lean == ()
    assert plan.memory.verdict == "fits"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": {"device": "cpu"}}, "this is a CPU"),
        ({"hardware": {"device": "a100-sxm-80"}}, r"this is CUDA capability 8\.0"),
        ({"hardware": {"device": "mi300x"}}, "this is rocm"),
        ({"method": "lora"}, "gradients of frozen weights too"),
        ({"model": "gpt2"}, r"no `nn\.Linear`"),
        ({"model": "mixtral-8x7b"}, "one grouped product"),
        ({"lean": "all"}, "products of its own"),
        ({"recompute": "selective"}, "products of its own"),
        ({"task": {"sequence_length": 512, "packing": False}}, "packing: false"),
        ({"task": {"sequence_length": 500, "global_batch": 4}, "micro_batch": 1}, "500 tokens"),
    ],
)
def test_where_fp8_cannot_be_it_is_refused_with_what_to_use(changes, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        api.plan(request(**changes), levers=False)
    assert "bf16-mixed" in caught.value.hint or "multiple of 16" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "freeze"}, "method: freeze"),
        ({"parallel": Parallel(dp_shard=2)}, "2 ranks"),
        ({"lean": ("norm",)}, "lean: norm"),
        ({"sequence_length": 15}, "30 tokens"),
    ],
)
def test_the_trainer_refuses_the_same(changes, said):
    with pytest.raises(InvalidRequest, match=said):
        build_model(recipe_of(**changes), "meta")
    with pytest.raises(InvalidRequest, match="this is a CPU"):
        build_model(recipe_of(), "cpu")


def test_older_gpus_have_no_fp8():
    check_device("cuda", (8, 9))
    with pytest.raises(InvalidRequest, match=r"8\.6"):
        check_device("cuda", (8, 6))


def test_torchao_still_makes_gradients_of_frozen_weights(emulated):
    """The reason why adapters are refused: three products where two would do."""
    layer = next(m for m in build().model.modules() if isinstance(m, Float8Linear))
    layer.weight.requires_grad_(False)
    x = torch.randn(32, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 32 * 32 * layer.out_features


def narrow_the_head_too(patch):
    patch.setattr(float8, "is_narrow", lambda w: len(w.shape) == 2 and "embed" not in w.name)


def forget_the_clamp(patch):
    def code(x):
        scale = declared.empty(x.meter, (), "float32")
        scaled = declared.like(x, dtype="float32")
        return declared.like(scaled, dtype=declared.CODES), scale

    patch.setattr(declared, "_code", code)


def test_faults_of_what_is_narrow_and_of_what_is_declared_are_found(monkeypatch):
    right = narrowed()
    with monkeypatch.context() as patch:
        forget_the_clamp(patch)
        # a chunk of its own: predictions are kept
        assert away_from_the_trace(loss="chunked", loss_chunk=17) > 0
    narrow_the_head_too(monkeypatch)
    assert narrowed() - right == {"lm_head"}
