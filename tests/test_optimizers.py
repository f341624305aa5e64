"""Every optimizer's declared bytes against what the real optimizer of torch holds and makes."""

import pytest
import torch
from msgspec.structs import replace

from memfit.catalog import find_device
from memfit.certify.fake_device import fake_device
from memfit.errors import InvalidRequest, UnknownName
from memfit.ledger import Phase
from memfit.model import TensorSpec
from memfit.optimizers import find_optimizer, optimizers
from memfit.train.live import LiveBytes

SHAPES = {
    "aligned": ((64, 64), (128,), (256, 64)),
    "small": ((1,), (3,)),
    "ragged": ((7, 13), (), (1001,), (5, 3, 2)),
    "growing": ((100,), (50,), (1000,), (999,)),
    "shrinking": ((1000,), (10,), (9,)),
}
CASES = [(name, i) for name in optimizers for i in optimizers.find(name).implementations]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_declared_bytes_are_what_the_optimizer_holds_and_makes(
    tiny_recipe, name, implementation, momentum, weight_decay, shapes, dtype
):
    settings = replace(
        tiny_recipe.optimizer, name=name, implementation=implementation,
        momentum=momentum, weight_decay=weight_decay,
    )  # fmt: skip
    family = find_optimizer(settings)
    specs = [TensorSpec(shape=s, dtype=str(dtype).removeprefix("torch.")) for s in shapes]
    parameters = parameters_of(shapes, dtype)
    optimizer = family.build(parameters, settings)
    optimizer.step()

    for spec, parameter in zip(specs, parameters, strict=True):
        held = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
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


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_implementations_are_the_ones_asked_for(tiny_recipe, name, implementation):
    settings = replace(tiny_recipe.optimizer, name=name, implementation=implementation)
    parameters = parameters_of([(4, 4)], torch.float32)
    group = find_optimizer(settings).build(parameters, settings).param_groups[0]
    asked = (implementation == "fused", implementation == "foreach")
    assert (bool(group["fused"]), bool(group["foreach"])) == asked


@pytest.mark.parametrize("name", list(optimizers))
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
    with fake_device(find_device("h100-sxm")):
        parameter = torch.nn.Parameter(torch.empty(4, 4, device="cuda"))
        optimizer = family.build([parameter], settings)
        parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        state = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
        on_host = [tuple(v.shape) for v in state if v.device.type == "cpu"]
    assert on_host == [spec.shape for spec in family.host_state(settings)]


def test_unknown_names_are_refused_with_the_known_ones(tiny_recipe):
    with pytest.raises(UnknownName, match="adamw"):
        find_optimizer(replace(tiny_recipe.optimizer, name="adam-w"))


def test_an_implementation_that_does_not_exist_is_refused(tiny_recipe):
    with pytest.raises(InvalidRequest, match="no implementation `magic`"):
        find_optimizer(replace(tiny_recipe.optimizer, implementation="magic"))
