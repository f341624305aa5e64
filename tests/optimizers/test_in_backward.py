"""Weights updated within backward: the same weights as after it, and gradients that die one by one.

What cannot be had this way is refused; here each reason is tried on torch itself, so that a torch
that mends it makes a test fail.
"""

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.world import fake_world
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.meta.meter import Meter
from memfit.optimizers import find_optimizer
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.request.problem import read_problem
from memfit.plan.search.levers import turn
from memfit.plan.simulate.in_backward import Updates
from memfit.plan.step_time.predicted_time import predict_timeline, sum_up
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.model import TensorSpec
from memfit.records.recipe import LEAN, Parallel
from memfit.records.request import Request
from memfit.train.measure.storages import inner_tensors
from memfit.train.step import in_backward
from memfit.train.step.build import build_model
from memfit.train.step.step import step
from tiny_models import make_batch, make_built, make_recipe, targets_of

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
WITHIN = {"clip_norm": 0.0, "in_backward": True}
OPTIMIZERS = [
    ("adamw", "fused"), ("adamw", "foreach"), ("adamw", "loop"), ("sgd", "loop"),
    ("adamw8bit", "loop"),
]  # fmt: skip


def trained(recipe, steps=3):
    """Every parameter and every tensor of the optimizer's state after a few steps."""
    built = make_built(recipe)
    for index in range(steps):
        batch = make_batch(seed=index)
        result = step(built, [batch], targets_of(batch))
    named = dict(built.model.named_parameters())
    assert all(p.grad is None for p in named.values())
    states = {
        f"{name}.{key}.{part}": inner
        for name, p in named.items()
        for key, value in built.optimizer.state.get(p, {}).items()
        for part, inner in inner_tensors(value).items()
    }
    return result, named, states


@pytest.mark.parametrize(("name", "implementation"), OPTIMIZERS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"precision": "bf16-mixed", "recompute_blocks": 2}),
     ("llama", {"method": "lora", "loss": "chunked", "loss_chunk": 12}),
     ("llama", {"lean": LEAN})],
    ids=["tied-recomputed", "lora-chunked", "lean"],
)  # fmt: skip
def test_weights_and_states_are_bit_by_bit_those_of_updates_after_backward(
    name, implementation, family, changes
):
    own = {"name": name, "implementation": implementation, "clip_norm": 0.0}
    after = trained(make_recipe(family, optimizer=own, **changes))
    within = trained(make_recipe(family, optimizer={**own, "in_backward": True}, **changes))
    assert torch.equal(after[0].loss, within[0].loss)
    assert within[0].grad_norm is None
    for one, other in zip(after[1:], within[1:], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key


def test_a_learning_rate_set_between_steps_holds_in_the_next():
    recipe = make_recipe(optimizer=WITHIN)
    built, batch = make_built(recipe), make_batch()
    before = [p.detach().clone() for p in built.model.parameters()]
    for group in built.optimizer.param_groups:
        group["lr"] = 0.0
    step(built, [batch], targets_of(batch))
    assert all(torch.equal(a, b) for a, b in zip(before, built.model.parameters(), strict=True))
    assert len(built.optimizer.param_groups[0]["params"]) == len(before)


def test_no_hook_outlives_the_backward_even_one_that_fails():
    built = make_built(make_recipe(optimizer=WITHIN))
    groups = built.optimizer.param_groups

    def failing():
        with in_backward.updating(built.optimizer):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failing()
    assert built.optimizer.param_groups is groups
    assert not any(p._post_accumulate_grad_hooks for p in built.model.parameters())


# -- memory ------------------------------------------------------------------------------------

SETTINGS = {
    "llama": ("llama", {}),
    "llama, mixed, recomputed": ("llama", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "gpt2, tied, chunked": ("gpt2", {"loss": "chunked", "loss_chunk": 12}),
    "qwen2, biases, mixed": ("qwen2", {"precision": "bf16-mixed"}),
    "llama, lora": ("llama", {"method": "lora", "attention": "efficient"}),
    "llama, lean": ("llama", {"precision": "bf16-mixed", "lean": LEAN, "recompute_blocks": 1}),
    "mixtral": ("mixtral", {"precision": "bf16", "base_format": "bf16"}),
}
OWN = {
    "fused": {}, "loop": {"implementation": "loop"}, "foreach": {"implementation": "foreach"},
    "8 bits": {"name": "adamw8bit", "implementation": "loop"},
    "sgd": {"name": "sgd", "implementation": "loop"},
}  # fmt: skip


def kinds(ledger, phase):
    found = ledger.by_kind(phase)
    return {k: n for k, n in found.items() if n and k is not Kind.FRAGMENTATION}


def predicted(recipe, device):
    return predict_memory(find_adapter(recipe).adapt(read_model(recipe.model), recipe),
                          recipe, device)  # fmt: skip


CASES = [
    *((name, own) for name in SETTINGS for own in ("fused", "loop")),
    ("llama", "foreach"), ("llama", "sgd"), ("llama", "8 bits"), ("qwen2, biases, mixed", "8 bits"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), CASES)
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
def test_the_prediction_of_every_phase_is_the_trace_byte_by_byte(device, name, own):
    family, changes = SETTINGS[name]
    changes = dict(changes)
    if device is H100 and "precision" not in changes:
        changes["attention"] = "efficient"
    if device is CPU:
        changes.pop("attention", None)
    recipe = make_recipe(family, optimizer={**OWN[own], **WITHIN}, **changes)
    traced, ledger = trace(recipe, device).ledger, predicted(recipe, device)
    assert {*traced.phases} == {*ledger.phases}
    for phase in set(ledger.phases) - {Phase.LOAD}:
        assert kinds(ledger, phase) == kinds(traced, phase), phase


def test_backward_holds_one_gradient_where_it_held_all():
    short = {"sequence_length": 4, "micro_batch": 1}  # so that gradients are most of it
    after = make_recipe(optimizer={"clip_norm": 0.0}, **short)
    within = make_recipe(optimizer=WITHIN, **short)
    weights = read_model(after.model).weights
    every, largest = sum(w.nbytes for w in weights), max(w.nbytes for w in weights)
    held = [trace(r, CPU).ledger.by_kind(Phase.BACKWARD).get(Kind.GRADIENTS, 0)
            for r in (after, within)]  # fmt: skip
    assert held[0] > every / 2
    assert held[1] <= largest


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 64), (3,), (33, 128), (4097,)], ids=str)
@pytest.mark.parametrize("cuda", [False, True])
def test_one_update_rises_as_high_as_the_family_says_of_one_parameter(own, dtype, shape, cuda):
    settings = replace(make_recipe().optimizer, **OWN[own])
    family, spec = find_optimizer(settings), TensorSpec(shape=shape, dtype=dtype)
    meter = Meter(cuda=cuda)
    family.update_alone(spec, settings, meter)
    live = top = 0
    for event in meter.events:
        live += meter.held(event) if event >= 0 else -meter.held(~event)
        top = max(top, live)
    assert live == 0
    assert top == family.step_temporaries([spec], settings, "blocks" if cuda else "live")


def test_forgetting_to_let_a_gradient_go_is_seen(monkeypatch):
    """Of the predictor: with gradients kept, it no longer equals the trace."""
    recipe = make_recipe("qwen2", optimizer=WITHIN, recompute_blocks=1)
    traced = trace(recipe, CPU).ledger
    update = Updates.update

    def keeping(self, weight):
        kept = weight.grad
        update(self, weight)
        weight.grad = kept

    monkeypatch.setattr(Updates, "update", keeping)
    assert kinds(predicted(recipe, CPU), Phase.BACKWARD) != kinds(traced, Phase.BACKWARD)


# -- what cannot be, tried on torch ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "own", "said"),
    [({}, {"clip_norm": 1.0}, "norm of all gradients"),
     ({"accumulation": 2}, {}, "2 micro-batches are summed"),
     ({"precision": "fp16-mixed"}, {}, "finite")],
)  # fmt: skip
def test_what_needs_all_gradients_is_refused(changes, own, said):
    recipe = make_recipe(optimizer={**WITHIN, **own}, **changes)
    with pytest.raises(InvalidRequest, match=said) as error:
        build_model(recipe, "meta")
    assert "in_backward: false" in error.value.hint


def test_after_a_backward_that_updates_there_is_no_norm_to_clip():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with in_backward.updating(optimizer):
        weight.square().sum().backward()
    assert nn.utils.clip_grad_norm_([weight], 1.0) == 0.0


def test_two_micro_batches_would_be_two_updates():
    def final(within):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for scale in (1.0, 3.0):
            if within:
                with in_backward.updating(optimizer):
                    (scale * weight.square()).sum().backward()
            else:
                (scale * weight.square()).sum().backward()
        if not within:
            optimizer.step()
        return weight.detach()

    assert not torch.allclose(final(True), final(False), rtol=1e-2)


def test_a_scaler_finds_no_gradient_to_check():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with in_backward.updating(optimizer):
        scaler.scale(weight.square().sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


def test_fsdp2_tells_the_hook_of_each_shard():
    """What updates on many ranks rest on; certify/test_ranks.py compares two processes with one."""
    told = []
    recipe = make_recipe(parallel=Parallel(dp_shard=2), optimizer={"clip_norm": 0.0})
    build_model(replace(recipe, parallel=Parallel()), "meta")
    with (
        fake_world(recipe.parallel, 0, "cpu", lambda stream: None, lambda *_: None),
        fake_device(CPU) as mode,
    ):
        mode.allow_non_fake_inputs = True
        model = build_model(recipe, "cpu")
        weights = list(model.parameters())
        for p in weights:
            p.register_post_accumulate_grad_hook(lambda p: told.append(id(p)))
        ids = torch.zeros(2, 16, dtype=torch.int64)
        model(input_ids=ids).logits.float().sum().backward()
    assert sorted(told) == sorted(id(p) for p in weights)


# -- planning ----------------------------------------------------------------------------------

REQUEST = {
    "model": make_recipe().model.config | {"num_hidden_layers": 6, "hidden_size": 64},
    "method": "full", "precision": "fp32", "loss": "plain", "attention": "flash",
    "task": {"sequence_length": 16, "global_batch": 2, "packing": False},
    "hardware": {"device": "cpu"}, "optimizer": {"clip_norm": 0.0},
}  # fmt: skip


def ask(**changes):
    return from_data({**REQUEST, **changes}, Request, source="the test")


@pytest.mark.usefixtures("tensors_alone")
def test_the_search_updates_within_backward_where_only_that_fits():
    roomy = api.plan(ask(), levers=False)
    assert not roomy.recipe.optimizer.in_backward  # the host's launches make it slower
    limit = {"memory": f"{roomy.memory.peak_allocated * 85 // 100} B"}
    tight = api.plan(ask(limits=limit), levers=False)
    assert tight.recipe.optimizer.in_backward
    assert tight.memory.verdict == "fits"
    refused = api.plan(
        ask(limits=limit, optimizer={"clip_norm": 0.0, "in_backward": False}), levers=False
    )
    assert refused.memory.verdict == "does_not_fit"
    clipped = api.plan(ask(limits=limit, optimizer={"clip_norm": 1.0}), levers=False)
    assert not clipped.recipe.optimizer.in_backward


def test_stated_it_takes_the_whole_batch_at_once_and_says_why_it_cannot():
    own = {"clip_norm": 0.0, "in_backward": True}
    plan = api.plan(ask(optimizer=own), levers=False)
    assert plan.recipe.optimizer.in_backward
    assert (plan.recipe.micro_batch, plan.recipe.accumulation) == (2, 1)
    for changes, said in (
        ({"optimizer": {"in_backward": True}}, "clip_norm: 1"),
        ({"optimizer": own, "micro_batch": 1}, "2 micro-batches"),
        ({"optimizer": own, "framework": "torchtitan"}, "not described"),
    ):
        request = ask(recompute="none", **{"micro_batch": 2, **changes})
        with pytest.raises(InvalidRequest, match=said):
            api.predict(request)


def test_it_is_a_lever_where_it_can_be_and_takes_time_for_its_launches():
    request = ask(micro_batch=2, recompute="none", hardware={"device": "h100-sxm"},
                  attention="efficient")  # fmt: skip
    recipe = api.plan(request, levers=False).recipe
    levers = {str(c): r for c, r in turn(read_problem(request), recipe)}
    other = levers["{'optimizer.in_backward': True}"]
    assert (
        api.plan(api.change(request, {"optimizer.in_backward": True}), levers=False).recipe == other
    )
    totals = sum_up(read_model(recipe.model))
    seconds = [predict_timeline(totals, r, H100).seconds for r in (recipe, other)]
    assert seconds[0] < seconds[1]


def test_a_recipe_that_does_not_update_within_backward_keeps_its_name():
    recipe = make_recipe()
    data = msgspec.to_builtins(recipe)
    del data["optimizer"]["in_backward"]
    assert from_data(data, type(recipe), source="older").digest == recipe.digest
    within = replace(recipe, optimizer=replace(recipe.optimizer, in_backward=True))
    assert within.digest != recipe.digest
