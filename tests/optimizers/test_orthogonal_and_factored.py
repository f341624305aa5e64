"""Muon and Adafactor: against torch's own optimizers alone, and against their papers' equations."""

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
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.optimizers import find_optimizer, muon
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.step_time.predicted_time import predict_timeline, sum_up
from memfit.records.ledger import Kind, Phase
from memfit.records.model import TensorSpec
from memfit.records.recipe import Parallel
from memfit.train.step.build import build_model
from memfit.train.step.step import step
from tiny_models import make_batch, make_built, make_recipe, targets_of

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")


def settings_of(name, **changes):
    return replace(make_recipe().optimizer, name=name, implementation="loop", **changes)


def build(name, parameters, ends=(), **changes):
    settings = settings_of(name, **changes)
    return find_optimizer(settings).build(parameters, settings, frozenset(ends))


# -- the update --------------------------------------------------------------------------------


def test_muon_takes_the_matrices_inside_and_adamw_all_else_as_torchs_two_do():
    recipe = make_recipe("mixtral", optimizer={"name": "muon", "implementation": "loop",
                                               "clip_norm": 0.0})  # fmt: skip
    built = make_built(recipe)
    twins = {n: nn.Parameter(p.detach().clone()) for n, p in built.model.named_parameters()}

    def inside(name, p):
        return p.dim() == 2 and "embed" not in name and "lm_head" not in name

    s = recipe.optimizer
    matrices = [p for n, p in twins.items() if inside(n, p)]
    others = [p for n, p in twins.items() if not inside(n, p)]
    assert matrices
    assert any(p.dim() == 3 for p in others)
    assert any(p.dim() == 2 for p in others)
    twin = (
        torch.optim.Muon(matrices, lr=s.learning_rate, weight_decay=s.weight_decay,
                         momentum=s.momentum, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=s.learning_rate, weight_decay=s.weight_decay,
                          betas=(s.beta1, s.beta2), eps=s.eps, fused=True),
    )  # fmt: skip
    seen = {}
    built.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in built.model.named_parameters()})
    )
    for index in range(2):
        batch = make_batch(seed=index)
        step(built, [batch], targets_of(batch))
        for name, p in twins.items():
            p.grad = seen[name]
        for own in twin:
            own.step()
    for name, p in built.model.named_parameters():
        assert torch.equal(p, twins[name]), name


def test_a_muon_update_is_nearly_orthogonal_and_as_large_as_adamws():
    """Singular values in about [0.5, 1.5], and a root mean square of 0.2 (2502.16982, eq. 4)."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(48, 96))
    optimizer = build("muon", [weight], learning_rate=1.0, weight_decay=0.0, momentum=0.9)
    weight.grad = torch.randn(48, 96)
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach() / (0.2 * 96**0.5))
    assert values.min() > 0.5
    assert values.max() < 1.5
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_an_adafactor_update_is_the_papers():
    """1804.04235, algorithms 4 and 5, in fp64, of a matrix and of a vector."""
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(7))
    twins = [p.detach().double() for p in (matrix, vector)]
    rows, columns, squares = torch.zeros(6, 1).double(), torch.zeros(1, 9).double(), 0.0
    optimizer = build("adafactor", [matrix, vector], learning_rate=0.02, weight_decay=0.0)
    for t in (1, 2, 3):
        gradients = [torch.randn(6, 9), torch.randn(7)]
        matrix.grad, vector.grad = gradients
        optimizer.step()
        g, h = (x.double() for x in gradients)
        new = t**-0.8
        rows = (1 - new) * rows + new * g.square().mean(1, keepdim=True)
        columns = (1 - new) * columns + new * g.square().mean(0, keepdim=True)
        squares = (1 - new) * squares + new * h.square()
        for i, (gradient, v) in enumerate(((g, rows @ columns / rows.mean()), (h, squares))):
            update = gradient / v.sqrt()
            update /= max(1.0, float(update.square().mean().sqrt()))
            size = max(1e-3, float(twins[i].square().mean().sqrt()))
            twins[i] = twins[i] - min(0.02, t**-0.5) * size * update
    torch.testing.assert_close(matrix.double(), twins[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vector.double(), twins[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "rate"), [("muon", 0.1), ("adafactor", 0.3)])
def test_200_steps_solve_least_squares_as_adamw_does(name, rate):
    """Not step by step, as these are other updates: to the same minimum, within 1e-3 of the first
    loss, with a rate that falls to zero (Muon's step has one length whatever the slope is).
    """

    def left(name, rate):
        torch.manual_seed(0)
        inputs = torch.randn(256, 32)
        target = inputs @ torch.randn(32, 16)
        weight = nn.Parameter(0.1 * torch.randn(32, 16))
        optimizer = build(name, [weight], learning_rate=rate, weight_decay=0.0)
        for index in range(200):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - index / 200)
            loss = (inputs @ weight - target).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            optimizer.step()
        return float(loss.detach() / target.square().mean())

    assert left("adamw", 0.1) < 1e-3
    assert left(name, rate) < 1e-3


# -- memory ------------------------------------------------------------------------------------


def test_matrices_keep_half_of_adamws_states_and_factors_keep_next_to_nothing():
    matrix = TensorSpec(shape=(64, 256))
    states = {
        name: sum(s.nbytes for s in find_optimizer(settings_of(name)).state(matrix, None))
        for name in ("adamw", "muon", "adafactor")
    }
    assert states == {
        "adamw": 4 + 2 * matrix.nbytes, "muon": matrix.nbytes, "adafactor": 4 + 4 * (64 + 256)
    }  # fmt: skip
    end = replace(matrix, end=True)
    assert len(find_optimizer(settings_of("muon")).state(end, None)) == 3


def kinds(ledger, phase):
    found = ledger.by_kind(phase)
    return {k: n for k, n in found.items() if n and k is not Kind.FRAGMENTATION}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("own", [{}, {"clip_norm": 0.0, "in_backward": True}], ids=["after", "in"])
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"precision": "bf16", "base_format": "bf16"}),
     ("mixtral", {"precision": "bf16-mixed", "recompute_blocks": 2}),
     ("llama", {"precision": "bf16-mixed", "method": "lora"})],
    ids=["qwen2-bf16", "mixtral-mixed", "llama-lora"],
)  # fmt: skip
def test_the_prediction_of_every_phase_is_the_trace(family, changes, device, own, name):
    recipe = make_recipe(family, optimizer={"name": name, "implementation": "loop", **own},
                         **changes)  # fmt: skip
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger, traced = predict_memory(model, recipe, device), trace(recipe, device).ledger
    for phase in set(ledger.phases) - {Phase.LOAD}:
        want, have = kinds(traced, phase), kinds(ledger, phase)
        for kind in want.keys() | have.keys():  # 16: 0-dim results that a caller holds
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), abs=16), (phase, kind)


def test_a_trace_of_muon_without_its_products_is_another(monkeypatch):
    """That the prediction equals the trace is no accident: Newton-Schulz holds 3 matrices."""
    spec = TensorSpec(shape=(64, 64), dtype="bfloat16")
    settings = settings_of("muon")
    whole = find_optimizer(settings).step_temporaries([spec], settings)
    assert whole == 5 * spec.nbytes  # the input, X, its successor, the gram matrix, the update
    monkeypatch.setattr(muon, "_orthogonalise", lambda update, shape, meter: update)
    assert find_optimizer(settings).step_temporaries([spec], settings) == spec.nbytes


# -- time and ranks ----------------------------------------------------------------------------


def test_muons_products_take_time_and_adafactor_moves_less_than_a_loop_of_adamw():
    recipe = make_recipe(optimizer={"implementation": "fused"}, precision="bf16-mixed")
    totals = sum_up(read_model(recipe.model))

    def updating(name, implementation):
        own = replace(recipe.optimizer, name=name, implementation=implementation)
        spans = predict_timeline(totals, replace(recipe, optimizer=own), H100).spans
        return next(s.duration for s in spans if s.op == "updating")

    assert updating("muon", "loop") > updating("adamw", "fused")
    assert updating("adafactor", "loop") < updating("adamw", "loop")
    assert updating("sgd", "fused") < updating("adamw", "fused")
    spec = TensorSpec(shape=(4096, 14336))
    family = find_optimizer(settings_of("muon"))
    n, m = spec.shape
    assert family.flop(spec, settings_of("muon")) == 5 * (4 * n * n * m + 2 * n**3)


def test_adafactor_on_many_ranks_is_refused():
    recipe = make_recipe(
        parallel=Parallel(dp_shard=2), optimizer={"name": "adafactor", "implementation": "loop"}
    )
    with pytest.raises(InvalidRequest, match="cannot update the shards") as error:
        build_model(recipe, "meta")
    assert "optimizer.name: adamw" in error.value.hint


def test_torchs_adafactor_still_cannot_update_shards(tmp_path):
    """Of a vector it takes one shard's norm for the whole; of a matrix it raises."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)])
        optimizer = build("adafactor", [weight])
        with pytest.raises(RuntimeError, match="in-place operations that require placement"):
            optimizer.step()
    finally:
        dist.destroy_process_group()
