"""bf16 weights rounded by chance: small updates are kept on average, where others are lost."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.optimizers import find_optimizer
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.request.problem import read_problem
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.model import TensorSpec
from memfit.records.request import Request
from memfit.train.measure.live import LiveBytes
from memfit.train.step.build import build_model
from memfit.train.step.step import step
from tiny_models import make_batch, make_built, make_recipe, targets_of

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
ROUNDED = {"name": "adamwbf16", "implementation": "loop", "stochastic_rounding": True}
BF16 = {"precision": "bf16", "base_format": "bf16"}
NAMES = ["adamwbf16", "adamw8bit", "adamw4bit", "adamwfp8"]


def descend(rounding, steps=60, rate=1e-4, seed=0):
    """Weights of 1 after updates of `rate` each: a 40th of bf16's spacing of 2^-8 below 1."""
    torch.manual_seed(seed)
    settings = replace(make_recipe().optimizer, **ROUNDED, learning_rate=rate, weight_decay=0.0)
    settings = replace(settings, stochastic_rounding=rounding)
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = find_optimizer(settings).build([weight], settings)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)  # AdamW then moves by the rate, exactly
        optimizer.step()
    return weight.detach().double()


def test_small_updates_vanish_without_it_and_are_unbiased_with_it():
    assert torch.equal(descend(False), torch.ones(64, 128).double())
    rounded = descend(True)
    moved, n = 60 * 1e-4, rounded.numel()
    # each step is 0 or 2^-8 by chance: the variance of their sum, and the mean's standard error
    error = (60 * (1e-4 * 2**-8) / n) ** 0.5
    assert abs(float(1 - rounded.mean()) - moved) < 4 * error
    assert set(rounded.unique().tolist()) <= {1 - k * 2**-8 for k in range(12)}


def test_rounding_that_always_goes_down_would_be_seen(monkeypatch):
    """The numeric test above is killed by the fault that it is there for."""
    torchao = pytest.importorskip("torchao.optim.adam")
    monkeypatch.setattr(
        torchao, "_fp32_to_bf16_sr", lambda x: (x.view(torch.int32) & -65536).view(torch.float32)
    )
    with pytest.raises(AssertionError):
        test_small_updates_vanish_without_it_and_are_unbiased_with_it()


def test_the_same_seed_rounds_alike_and_another_does_not():
    one, again, other = (descend(True, steps=5, rate=1e-3, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shapes", [((64, 64), (7, 13)), ((17, 256), (128,), ())], ids=str)
def test_declared_temporaries_are_those_of_the_real_update(name, shapes):
    settings = replace(make_recipe().optimizer, **{**ROUNDED, "name": name})
    family = find_optimizer(settings)
    parameters = [nn.Parameter(torch.randn(s).bfloat16()) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = family.build(parameters, settings)
    optimizer.step()
    live = LiveBytes("cpu")
    live.register_model(nn.ParameterList(parameters))
    live.register_optimizer(optimizer)
    before = live.live
    with live:
        live.enter(Phase.OPTIMIZER_STEP)
        optimizer.step()
    specs = [TensorSpec(shape=s, dtype="bfloat16") for s in shapes]
    rises = [family.step_temporaries(specs, replace(settings, stochastic_rounding=on))
             for on in (True, False)]  # fmt: skip
    assert live.peak - before == rises[0]
    # to code a moment takes more than to round a weight
    assert rises[0] > rises[1] or name in ("adamw8bit", "adamw4bit")


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"clip_norm": 0.0, "in_backward": True}], ids=["after", "in"])
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
def test_the_prediction_of_every_phase_is_the_trace_when_rounding(device, own):
    recipe = make_recipe(optimizer={**ROUNDED, **own}, **BF16)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger, traced = predict_memory(model, recipe, device), trace(recipe, device).ledger
    for phase in set(ledger.phases) - {Phase.LOAD}:
        want, have = traced.by_kind(phase), ledger.by_kind(phase)
        for kind in (want.keys() | have.keys()) - {Kind.FRAGMENTATION}:
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), abs=16), (phase, kind)


def test_a_step_with_rounding_learns():
    built = make_built(make_recipe(optimizer=ROUNDED, **BF16))
    batch = make_batch()
    losses = [float(step(built, [batch], targets_of(batch)).loss) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("changes", "own", "said"),
    [({}, ROUNDED, "precision: fp32"), (BF16, {"stochastic_rounding": True}, "cannot round")],
    ids=["fp32", "torch"],
)
def test_it_is_refused_where_it_would_round_nothing(changes, own, said):
    with pytest.raises(InvalidRequest, match=said):
        build_model(make_recipe(optimizer=own, **changes), "meta")
    request = {
        "model": make_recipe().model.config, "method": "full", "hardware": {"device": "cpu"},
        "precision": changes.get("precision", "fp32"), "optimizer": own,
        "task": {"sequence_length": 16},
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=said):
        read_problem(from_data(request, Request, source="the test"))


def forget(name, dtype, beta2=0.999, rounding=False):
    """The mean second moment after gradients fell tenfold, over what it was before."""
    torch.manual_seed(0)
    own = replace(
        make_recipe().optimizer, name=name, implementation="loop", beta2=beta2, learning_rate=1e-6,
        weight_decay=0.0, stochastic_rounding=rounding,
    )  # fmt: skip
    weight = nn.Parameter(torch.ones(32, 128, dtype=dtype))
    optimizer = find_optimizer(own).build([weight], own)
    seen = []
    for size, steps in ((1.0, 400), (0.1, 1500)):
        for _ in range(steps):
            weight.grad = torch.full_like(weight, size)
            optimizer.step()
        moment = optimizer.state[weight]["exp_avg_sq"]
        whole = moment.dequantize() if hasattr(moment, "dequantize") else moment
        seen.append(float(whole.double().mean()))
    return seen[1] / seen[0]


def test_second_moments_in_bf16_stall_where_those_in_fp32_and_8_bits_do_not():
    """Why `auto` never takes pure bf16: a step changes a moment by 1 - beta2 of itself at most,
    which bf16 loses where that is less than half of its last digit, 2^-8."""
    before, after = 1 - 0.999**400, (1 - 0.999**400) * 0.999**1500 + 0.01 * (1 - 0.999**1500)
    assert forget("adamw", torch.float32) == pytest.approx(after / before, rel=1e-3)
    assert forget("adamw8bit", torch.bfloat16, rounding=True) == pytest.approx(
        after / before, rel=0.1
    )
    assert forget("adamw", torch.bfloat16) > 3 * after / before
    assert forget("adamwbf16", torch.bfloat16, rounding=True) > 3 * after / before
    short = (1 - 0.99**400) * 0.99**1500 + 0.01 * (1 - 0.99**1500)
    assert forget("adamw", torch.bfloat16, beta2=0.99) < 2 * short / (1 - 0.99**400)
