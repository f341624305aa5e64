"""Lion against the paper's algorithm, and its bytes on shards and in a whole step."""

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.families import read_model
from memfit.optimizers import find_optimizer, optimizers
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.request.problem import find_rate, read_problem
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request, change
from tiny_models import make_recipe

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
WAYS = list(optimizers.find("lion").implementations)


def build(parameters, name="lion", implementation="loop", **changes):
    own = replace(make_recipe().optimizer, name=name, implementation=implementation, **changes)
    return find_optimizer(own).build(parameters, own)


@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_three_updates_are_the_papers(implementation, weight_decay):
    """2302.06675, algorithm 2, in fp64; its decay is taken off the weight before the step, as eta
    times lambda times the weight in one sum.
    """
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(7))]
    twins = [w.detach().double() for w in weights]
    momenta = [torch.zeros_like(t) for t in twins]
    rate, beta1, beta2 = 0.02, 0.8, 0.95
    optimizer = build(
        weights, implementation=implementation, learning_rate=rate, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay,
    )  # fmt: skip
    for _ in range(3):
        gradients = [torch.randn(6, 9), torch.randn(7)]
        for i, gradient in enumerate(gradients):
            weights[i].grad = gradient
            g = gradient.double()
            direction = (beta1 * momenta[i] + (1 - beta1) * g).sign()
            twins[i] = twins[i] - rate * (direction + weight_decay * twins[i])
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * g
        optimizer.step()
    for weight, twin, momentum in zip(weights, twins, momenta, strict=True):
        torch.testing.assert_close(weight.detach().double(), twin, rtol=1e-5, atol=1e-6)
        held = optimizer.state[weight]["exp_avg"].double()
        torch.testing.assert_close(held, momentum, rtol=1e-5, atol=1e-6)


def test_200_steps_solve_least_squares_as_adamw_does():
    """At a rate that lets the largest element, about 3.5, be reached: all steps sum to 10."""

    def left(name, rate):
        torch.manual_seed(0)
        inputs = torch.randn(256, 32)
        target = inputs @ torch.randn(32, 16)
        weight = nn.Parameter(0.1 * torch.randn(32, 16))
        optimizer = build([weight], name, learning_rate=rate, weight_decay=0.0, beta2=0.99)
        for index in range(200):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - index / 200)
            loss = (inputs @ weight - target).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            optimizer.step()
        return float(loss.detach() / target.square().mean())

    assert left("adamw", 0.1) < 1e-3
    assert left("lion", 0.1) < 1e-3


@pytest.mark.parametrize("implementation", WAYS)
def test_a_shard_is_updated_as_its_part_of_the_whole(tmp_path, implementation):
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 8), [torch.randn(6, 8) for _ in range(2)]
    plain = nn.Parameter(start.clone())
    whole = build([plain], implementation=implementation, weight_decay=0.1)
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        sharded = build([weight], implementation=implementation, weight_decay=0.1)
        for gradient in gradients:
            plain.grad = gradient
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            whole.step()
            sharded.step()
        assert torch.equal(weight.full_tensor(), plain)
    finally:
        dist.destroy_process_group()


def kinds(ledger, phase):
    found = ledger.by_kind(phase)
    return {k: n for k, n in found.items() if n and k is not Kind.FRAGMENTATION}


@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize("own", [{}, {"clip_norm": 0.0, "in_backward": True}], ids=["after", "in"])
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
def test_the_prediction_of_every_phase_is_the_trace(device, own, implementation):
    recipe = make_recipe(
        "qwen2", precision="bf16", base_format="bf16",
        optimizer={"name": "lion", "implementation": implementation, **own},
    )  # fmt: skip
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger, traced = predict_memory(model, recipe, device), trace(recipe, device).ledger
    for phase in set(ledger.phases) - {Phase.LOAD}:
        want, have = kinds(traced, phase), kinds(ledger, phase)
        for kind in want.keys() | have.keys():  # 16: 0-dim results that a caller holds
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), abs=16), (phase, kind)


def test_its_usual_learning_rate_is_a_third_of_adamws():
    request = Request(model="gpt2")
    problem = read_problem(request)

    def rate(**changes):
        asked = change(request, {f"optimizer.{key}": value for key, value in changes.items()})
        return find_rate(asked, problem.reference, problem.model, "full")

    assert rate(name="lion") == pytest.approx(rate(name="adamw") / 3)
    assert rate(name="lion", learning_rate=1e-3) == 1e-3
