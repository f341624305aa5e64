"""bitsandbytes' 8-bit AdamW, plain and paged: real states on this CPU, traces of a GPU's step."""

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.certify.tracing.fake_device import fake_device
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.optimizers import bits_and_bytes, find_optimizer
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.model import TensorSpec
from memfit.records.recipe import Parallel
from memfit.records.request import Request
from memfit.train.step.build import build_model
from memfit.train.step.step import step
from tiny_models import make_batch, make_built, make_recipe, targets_of

bnb = pytest.importorskip("bitsandbytes")
H100 = catalog.find_device("h100-sxm")
PLAIN, PAGED = "adamw8bit-bnb", "adamw8bit-paged"
TABLES = ("qmap1", "qmap2")
SHAPES = ((64, 64), (128,), (4095,), (4097,), (17, 256), (1, 4352), ())


def settings_of(name=PLAIN, **changes):
    return replace(make_recipe().optimizer, name=name, implementation="fused", **changes)


def build(parameters, name=PLAIN, **changes):
    settings = settings_of(name, **changes)
    return find_optimizer(settings).build(parameters, settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_declared_states_are_what_bitsandbytes_holds(dtype):
    family, settings = find_optimizer(settings_of()), settings_of()
    parameters = [nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = build(parameters)
    optimizer.step()
    shared = set()
    for p in parameters:
        spec = TensorSpec(shape=tuple(p.shape), dtype=str(dtype).removeprefix("torch."))
        tensors = {k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        shared |= {tensors.pop(k).untyped_storage()._cdata for k in TABLES if k in tensors}
        held = [(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in tensors.values()]
        assert held == [(s.shape, s.dtype) for s in family.state(spec, settings)]
        assert family.shares(spec, settings) == ("qmap1" in optimizer.state[p])
    assert len(shared) == len(family.shared_state(settings))


def test_the_update_is_bitsandbytes_own():
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128))] for _ in range(2))
    s = settings_of()
    mine = build(ours)
    original = bnb.optim.AdamW8bit(theirs, lr=s.learning_rate, betas=(s.beta1, s.beta2),
                                   eps=s.eps, weight_decay=s.weight_decay)  # fmt: skip
    for seed in range(3):
        torch.manual_seed(seed)
        ours[0].grad = torch.randn(64, 128)
        theirs[0].grad = ours[0].grad.clone()
        mine.step()
        original.step()
    assert torch.equal(ours[0], theirs[0])
    for key in ("state1", "state2", "absmax1", "absmax2", *TABLES):
        assert torch.equal(mine.state[ours[0]][key], original.state[theirs[0]][key])


def drift(name):
    """Loss after 200 steps of least squares, less that of fp32 AdamW, of the first loss."""

    def losses(name):
        torch.manual_seed(0)
        inputs = torch.randn(256, 64)
        target = inputs @ torch.randn(64, 64) + 0.1 * torch.randn(256, 64)
        weight = nn.Parameter(torch.zeros(64, 64))
        own = replace(settings_of(), name=name, learning_rate=0.02, weight_decay=0.0)
        if name == "adamw8bit":
            own = replace(own, implementation="loop")
        optimizer = find_optimizer(own).build([weight], own)
        for _ in range(200):
            loss = (inputs @ weight - target).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            optimizer.step()
        return float(target.square().mean()), float(loss.detach())

    first, plain = losses("adamw")
    assert plain < 0.01 * first
    return abs(losses(name)[1] - plain) / first


@pytest.mark.parametrize("name", [PLAIN, "adamw8bit"])
def test_200_steps_of_least_squares_drift_by_less_than_a_thousandth(name):
    assert drift(name) < 1e-3


def test_a_step_with_it_learns():
    built = make_built(make_recipe(optimizer={"name": PLAIN, "implementation": "fused"}))
    batch = make_batch()
    losses = [float(step(built, [batch], targets_of(batch)).loss) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


# -- a GPU's ------------------------------------------------------------------------------------

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}  # some are paged


def kinds(ledger, phase):
    found = ledger.by_kind(phase)
    return {k: n for k, n in found.items() if n and k is not Kind.FRAGMENTATION}


@pytest.mark.parametrize("own", [{}, {"clip_norm": 0.0, "in_backward": True}], ids=["after", "in"])
@pytest.mark.parametrize("name", [PLAIN, PAGED])
def test_the_prediction_of_a_gpus_phases_is_the_trace(name, own):
    recipe = make_recipe(
        config=make_recipe().model.config | WIDE, precision="bf16-mixed",
        optimizer={"name": name, "implementation": "fused", **own},
    )  # fmt: skip
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger, traced = predict_memory(model, recipe, H100), trace(recipe, H100).ledger
    for phase in set(ledger.phases) - {Phase.LOAD}:
        want, have = kinds(traced, phase), kinds(ledger, phase)
        for kind in want.keys() | have.keys():
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), abs=16), (phase, kind)
    assert kinds(ledger, Phase.FORWARD)[Kind.OPTIMIZER_STATE] > 0


def test_what_is_paged_is_not_the_allocators():
    family, settings = find_optimizer(settings_of(PAGED)), settings_of(PAGED)
    for shape in ((256, 512), (64, 64)):
        spec = TensorSpec(shape=shape)
        with fake_device(H100):
            weight = nn.Parameter(torch.empty(shape, device="cuda"))
            optimizer = build([weight], PAGED)
            weight.grad = torch.empty_like(weight)
            optimizer.step()
            state = optimizer.state[weight]
            there = [v for k, v in state.items()
                     if isinstance(v, torch.Tensor) and k not in TABLES
                     and v.device.type == "cuda"]  # fmt: skip
        held = [s.nbytes for s in family.on_device(spec, settings)]
        assert [v.nbytes for v in there] == held
        assert (len(held) < 4) == (spec.numel >= bits_and_bytes.PAGED)


# -- where it cannot be ------------------------------------------------------------------------


def test_it_is_refused_on_a_cpu_and_on_many_ranks():
    with pytest.raises(InvalidRequest, match="managed memory") as error:
        build([nn.Parameter(torch.zeros(4))], PAGED)
    assert "adamw8bit" in error.value.hint
    request = {
        "model": make_recipe().model.config, "optimizer": {"name": PLAIN},
        "hardware": {"device": "cpu"}, "task": {"sequence_length": 16},
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match="exists on CUDA only"):
        api.plan(from_data(request, Request, source="the test"), levers=False)
    on_gpu = from_data({**request, "hardware": {"device": "h100-sxm"}}, Request, source="the test")
    assert api.plan(on_gpu, levers=False).recipe.optimizer.implementation == "fused"
    own = {"name": PLAIN, "implementation": "fused"}
    with pytest.raises(InvalidRequest, match="know no shards"):
        build_model(make_recipe(parallel=Parallel(dp_shard=2), optimizer=own), "meta")


def test_bitsandbytes_still_cannot_update_shards(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(torch.randn(64, 128), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.randn(64, 128), mesh, [Shard(0)])
        with pytest.raises((RuntimeError, NotImplementedError)):
            build([weight]).step()
    finally:
        dist.destroy_process_group()
