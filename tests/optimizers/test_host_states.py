"""The optimizer's states on the host: traced for a GPU, beside which alone torchao's class runs."""

import inspect

import pytest
import torch
from msgspec.structs import replace

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.families import read_model
from memfit.optimizers.shared.offloaded import SMALLEST
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.step_time.predicted_time import predict_timeline, sum_up
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request
from memfit.train.step.build import build_model
from memfit.train.step.host_states import Offloaded
from tiny_models import make_recipe

H100 = catalog.find_device("h100-sxm")
OWN = {"clip_norm": 0.0}
WIDE = make_recipe().model.config | {"hidden_size": 64, "intermediate_size": 176}


def offloading(**changes):
    own = {**OWN, **changes.pop("optimizer", {})}
    return make_recipe(config=WIDE, optimizer=own, offload="optimizer", **changes)


def predicted(recipe):
    return predict_memory(find_adapter(recipe).adapt(read_model(recipe.model), recipe),
                          recipe, H100)  # fmt: skip


def kinds(ledger, phase):
    found = ledger.by_kind(phase)
    return {k: n for k, n in found.items() if n and k is not Kind.FRAGMENTATION}


@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16-mixed"}, {"precision": "bf16", "base_format": "bf16", "accumulation": 2},
     {"precision": "bf16-mixed", "method": "lora", "recompute_blocks": 2}],
    ids=["mixed", "bf16-accumulated", "lora"],
)  # fmt: skip
def test_the_prediction_of_every_phase_is_the_trace_with_states_on_the_host(changes):
    recipe = offloading(**changes)
    ledger, traced = predicted(recipe), trace(recipe, H100)
    for phase in set(ledger.phases) - {Phase.LOAD}:
        want, have = kinds(traced.ledger, phase), kinds(ledger, phase)
        for kind in want.keys() | have.keys():
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), abs=16), (phase, kind)
    assert any("pinned copies" in bound for bound in traced.bounds)


def test_only_states_of_small_weights_stay_on_the_device():
    recipe = offloading(precision="bf16-mixed")
    weights = read_model(recipe.model).weights
    small = sum(8 * w.numel + 4 for w in weights if w.numel < SMALLEST)
    assert kinds(trace(recipe, H100).ledger, Phase.FORWARD)[Kind.OPTIMIZER_STATE] == small
    plain = replace(recipe, offload="none")
    every = sum(8 * w.numel + 4 for w in weights)
    assert kinds(trace(plain, H100).ledger, Phase.FORWARD)[Kind.OPTIMIZER_STATE] == every


def test_the_link_to_the_host_takes_time():
    recipe = offloading(precision="bf16-mixed")
    totals = sum_up(read_model(recipe.model))

    def updating(recipe):
        spans = predict_timeline(totals, recipe, H100).spans
        return next(s.duration for s in spans if s.op == "updating")

    plain = replace(recipe, offload="none")
    assert updating(recipe) > 10 * updating(plain)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"optimizer": {"clip_norm": 1.0}}, "knows their norm"),
     ({"optimizer": {"name": "sgd"}}, "no offloaded form"),
     ({"optimizer": {"in_backward": True}}, "after backward"),
     ({"precision": "fp16-mixed"}, "unscaled"),
     ({"parallel": Parallel(dp_shard=2)}, "one device")],
)  # fmt: skip
def test_what_cannot_be_offloaded_is_refused(changes, said):
    with pytest.raises(InvalidRequest, match=said):
        build_model(offloading(**changes), "meta")


def test_a_request_states_it_and_a_cpu_has_nothing_to_offload_to():
    request = {
        "model": WIDE, "method": "full", "precision": "bf16-mixed", "offload": "optimizer",
        "optimizer": {"clip_norm": 0.0}, "hardware": {"device": "h100-sxm"},
        "task": {"sequence_length": 16, "global_batch": 2},
    }  # fmt: skip
    plan = api.plan(from_data(request, Request, source="the test"), levers=False)
    assert plan.recipe.offload == "optimizer"
    on_cpu = {**request, "hardware": {"device": "cpu"}}
    with pytest.raises(InvalidRequest, match="already"):
        api.plan(from_data(on_cpu, Request, source="the test"), levers=False)


def test_the_search_puts_states_on_the_host_where_only_that_fits():
    asked = {
        "model": WIDE, "method": "full", "precision": "bf16-mixed", "weights": "random",
        "optimizer": {"clip_norm": 0.0, "in_backward": False}, "hardware": {"device": "h100-sxm"},
        "task": {"sequence_length": 16, "global_batch": 2},
    }  # fmt: skip

    def plan(offload, limit, host=""):
        own = {**asked, "offload": offload, "limits": {"memory": limit, "host_memory": host}}
        return api.plan(from_data(own, Request, source="the test"), levers=False)

    needs = {o: plan(o, "1 MiB").memory.needed for o in ("none", "activations", "optimizer")}
    least = min(needs["none"], needs["activations"])
    assert needs["optimizer"] < least
    tight = plan("auto", f"{least - 1} B")
    assert tight.recipe.offload == "optimizer"
    assert tight.memory.needed < tight.memory.usable
    assert plan("auto", "4 GiB").recipe.offload == "none"  # the link takes time
    assert plan("auto", "1 MiB").memory.needed == needs["optimizer"]  # the nearest miss
    held = tight.host["offloaded"]
    enough = plan("auto", f"{least - 1} B", f"{held} B")
    assert enough.recipe == tight.recipe
    assert any(f"within `limits.host_memory: {held} B`" in text for text in enough.assumptions)
    for offload in ("auto", "optimizer"):
        with pytest.raises(DoesNotFit, match=rf"`offload: optimizer` keeps .* {held - 1} B"):
            plan(offload, f"{least - 1} B", f"{held - 1} B")
    assert plan("auto", "4 GiB", "1 B").recipe.offload == "none"
    stated = api.state(enough)
    less = api.change(stated, {"limits.host_memory": f"{held - 1} B"})
    with pytest.raises(DoesNotFit, match=r"limits\.host_memory"):
        api.predict(less)


def test_the_search_takes_what_a_small_host_can_hold():
    """Activations on the host are the fastest; then fewer of them, then none and recomputing."""
    asked = {
        "model": "qwen3-0.6b", "method": "lora", "loss": "chunked", "offload": "auto",
        "hardware": {"device": "rtx-4090"}, "task": {"sequence_length": 4096, "global_batch": 8},
    }  # fmt: skip

    def plan(host):
        own = {**asked, "limits": {"memory": "4 GiB", "host_memory": host}}
        return api.plan(from_data(own, Request, source="the test"), levers=False)

    free, some, none = plan(""), plan("1 GiB"), plan("1 MiB")
    assert free.recipe.offload == "activations"
    assert free.host["offloaded"] > 2**30
    assert some.host.get("offloaded", 0) <= 2**30
    assert none.recipe.offload == "none"
    assert {p.memory.verdict for p in (free, some, none)} == {"fits"}


def test_gradients_are_on_their_way_before_they_could_be_clipped():
    """Of torchao's source, which needs a GPU to run: the copy is made in backward's hook."""
    torchao = pytest.importorskip("torchao.optim.cpu_offload")
    source = inspect.getsource(torchao.CPUOffloadOptimizer)
    hook = source[source.index("def backward_hook") : source.index("for param_group in")]
    assert "p_host.grad.copy_(p_device.grad, non_blocking=True)" in hook


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_on_a_gpu_the_host_updates_as_the_device_does():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(128, 64, device="cuda")) for _ in range(2)]
    twins = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    settings = make_recipe(optimizer=OWN).optimizer
    ours = Offloaded({f"{i}": w for i, w in enumerate(weights)}, settings)
    plain = torch.optim.AdamW(
        twins, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
        eps=settings.eps, weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip
    for _ in range(3):
        for own, optimizer in ((weights, ours), (twins, plain)):
            (own[0] * own[1]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(weights, twins, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert all(s["exp_avg"].device.type == "cpu" for s in ours.state.values())
