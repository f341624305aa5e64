"""Every optimizer's declared bytes against what the real optimizer of torch holds and makes."""

import pytest
import torch
from msgspec.structs import replace

from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.optimizers import find_optimizer, optimizers
from memfit.records.ledger import Phase
from memfit.records.model import TensorSpec
from memfit.train.measure.live import LiveBytes
from memfit.train.measure.storages import inner_tensors

SHAPES = {
    "aligned": ((64, 64), (128,), (256, 64)),
    "small": ((1,), (3,)),
    "around 4096": ((4095,), (64, 64), (4097,), (17, 256), (33, 128), (1, 4352)),
    "ragged": ((7, 13), (), (1001,), (5, 3, 2)),
    "growing": ((100,), (50,), (1000,), (999,)),
    "shrinking": ((1000,), (10,), (9,)),
}
CASES = [(name, i) for name in optimizers for i in optimizers.find(name).implementations]
ON_CPU = [(name, i) for name, i in CASES if i not in optimizers.find(name).cuda_only]
TORCHS = [(name, i) for name, i in CASES if name in ("adamw", "sgd")]
LOW_BIT = {
    "adamwbf16": "_AdamW", "adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit",
    "adamwfp8": "AdamWFp8",
}  # fmt: skip
SETTINGS = [  # momentum, weight_decay
    pytest.param(0.9, 0.0, id="momentum"),
    pytest.param(0.9, 0.1, id="decay"),
    pytest.param(0.0, 0.1, id="no-momentum"),
]


def parameters_of(shapes, dtype):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def held_by(optimizer, parameter):
    """The plain tensors of a parameter's state; a coded moment is several."""
    state = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
    return [inner for v in state for inner in inner_tensors(v).values()]


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
@pytest.mark.parametrize(("name", "implementation"), ON_CPU)
def test_declared_bytes_are_what_the_optimizer_holds_and_makes(
    tiny_recipe, name, implementation, momentum, weight_decay
):
    settings = replace(
        tiny_recipe.optimizer, name=name, implementation=implementation,
        momentum=momentum, weight_decay=weight_decay,
    )  # fmt: skip
    family = find_optimizer(settings)
    for dtype in (torch.float32, torch.bfloat16):
        for shapes in SHAPES.values():
            hold_to_declared_bytes(family, settings, shapes, dtype)


def hold_to_declared_bytes(family, settings, shapes, dtype):
    specs = [TensorSpec(shape=s, dtype=str(dtype).removeprefix("torch.")) for s in shapes]
    parameters = parameters_of(shapes, dtype)
    optimizer = family.build(parameters, settings)
    optimizer.step()

    for spec, parameter in zip(specs, parameters, strict=True):
        held = held_by(optimizer, parameter)
        declared = family.state(spec, settings)
        described = [(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in held]
        assert described == [(s.shape, s.dtype) for s in declared]

    live = LiveBytes("cpu")
    live.register_model(torch.nn.ParameterList(parameters))
    live.register_optimizer(optimizer)
    before = live.live
    with live:
        live.enter(Phase.OPTIMIZER_STEP)
        optimizer.step()
    assert live.peak - before == family.step_temporaries(specs, settings)


@pytest.mark.parametrize(("name", "implementation"), TORCHS)
def test_implementations_are_the_ones_asked_for(tiny_recipe, name, implementation):
    settings = replace(tiny_recipe.optimizer, name=name, implementation=implementation)
    parameters = parameters_of([(4, 4)], torch.float32)
    group = find_optimizer(settings).build(parameters, settings).param_groups[0]
    asked = (implementation == "fused", implementation == "foreach")
    assert (bool(group["fused"]), bool(group["foreach"])) == asked


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_implementations_make_the_same_update(tiny_recipe, name):
    updated = []
    for implementation in optimizers.find(name).implementations:
        settings = replace(
            tiny_recipe.optimizer, name=name, implementation=implementation, weight_decay=0.1
        )
        parameters = parameters_of(SHAPES["ragged"], torch.float32)
        optimizer = find_optimizer(settings).build(parameters, settings)
        optimizer.step()
        optimizer.step()
        updated.append(torch.cat([p.detach().flatten() for p in parameters]))
    for other in updated[1:]:
        torch.testing.assert_close(other, updated[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_declared_host_state_is_what_torch_keeps_off_the_device(tiny_recipe, name, implementation):
    settings = replace(tiny_recipe.optimizer, name=name, implementation=implementation)
    family = find_optimizer(settings)
    family.build([torch.nn.Parameter(torch.empty(1, device="meta"))], settings)  # imports
    with fake_device(find_device("h100-sxm")):
        parameter = torch.nn.Parameter(torch.empty(64, 64, device="cuda"))
        optimizer = family.build([parameter], settings)
        parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        state = held_by(optimizer, parameter)
        on_host = [tuple(v.shape) for v in state if v.device.type == "cpu"]
    assert on_host == [spec.shape for spec in family.host_state(settings)]


def test_unknown_names_are_refused_with_the_known_ones(tiny_recipe):
    with pytest.raises(UnknownName, match="adamw"):
        find_optimizer(replace(tiny_recipe.optimizer, name="adam-w"))


def test_an_implementation_that_does_not_exist_is_refused(tiny_recipe):
    with pytest.raises(InvalidRequest, match="no implementation `magic`"):
        find_optimizer(replace(tiny_recipe.optimizer, implementation="magic"))


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loop_is_torchaos_own_step_run_operator_by_operator(
    tiny_recipe, name, dtype, monkeypatch
):
    torchao = pytest.importorskip("torchao.optim")
    settings = replace(tiny_recipe.optimizer, name=name, implementation="loop", weight_decay=0.1)
    ours, theirs = (parameters_of(SHAPES["around 4096"], dtype) for _ in range(2))
    mine = find_optimizer(settings).build(ours, settings)
    original = getattr(torchao, LOW_BIT[name])(
        theirs, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
        eps=settings.eps, weight_decay=0.1,
    )  # fmt: skip
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for _ in range(3):
        mine.step()
        original.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for x, y in zip(held_by(mine, a), held_by(original, b), strict=True):
            assert torch.equal(x.float(), y.float())


@pytest.mark.parametrize("name", LOW_BIT)
def test_a_compiled_update_is_refused_on_a_cpu_and_counts_nothing_on_a_gpu(tiny_recipe, name):
    settings = replace(tiny_recipe.optimizer, name=name, implementation="fused")
    family = find_optimizer(settings)
    with pytest.raises(InvalidRequest, match="compiled for GPUs only"):
        family.build([torch.nn.Parameter(torch.zeros(4))], settings)
    specs = [TensorSpec(shape=(64, 64))]
    with fake_device(find_device("h100-sxm")):
        parameter = torch.nn.Parameter(torch.empty(64, 64, device="cuda"))
        optimizer = family.build([parameter], settings)
        parameter.grad = torch.empty_like(parameter)
        live = LiveBytes("cuda")
        live.register_model(torch.nn.ParameterList([parameter]))
        before = live.live
        with live:
            optimizer.step()
            made = live.live - before
            optimizer.step()
    on_host = sum(s.nbytes for s in family.host_state(settings))
    assert made == sum(s.nbytes for s in family.state(specs[0], settings)) - on_host
    assert live.peak - before == made


@pytest.mark.parametrize(
    ("name", "tolerance"), [("adamw8bit", 0.005), ("adamwfp8", 0.005), ("adamw4bit", 0.15)]
)
def test_low_bit_states_solve_least_squares_like_fp32(tiny_recipe, name, tolerance):
    """200 steps on inputs whose scales differ a hundredfold, so that a block of 256 moments spans
    four decades. The tolerance is what may be left of the first loss beyond what fp32 leaves: 8
    bits follow it; the 16 values of a 4-bit code do not tell small moments apart.
    """

    def losses(name, implementation):
        settings = replace(
            tiny_recipe.optimizer, name=name, implementation=implementation, learning_rate=0.02
        )
        torch.manual_seed(0)
        inputs = torch.randn(256, 64) * torch.logspace(0, -2, 64)
        target = inputs @ torch.randn(64, 64)
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = find_optimizer(settings).build([weight], settings)
        for _ in range(200):
            loss = (inputs @ weight - target).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            optimizer.step()
        return float(target.square().mean()), float(loss.detach())

    first, plain = losses("adamw", "fused")
    assert plain < 0.01 * first
    assert losses(name, "loop")[1] - plain < tolerance * first
