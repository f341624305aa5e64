"""Tensors of a device that is not here: the trainer's own code runs on them, nothing is computed.

`FakeTensorMode` gives tensors with shape, dtype and device and no data. That alone runs a CPU step.
For a step of a CUDA device, on any torch (built without CUDA, or with it and no GPU, or with one),
each function below undoes one place where torch would notice that the device is not here, and says
which. All are undone when the context ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.certify.cuda_guard import cuda_hooks, install_guard
from memfit.certify.cuda_kernels import cuda_kernels
from memfit.errors import NotCertified
from memfit.hardware import Device

aten = torch.ops.aten


def device_type(device: Device) -> str:
    """torch's name for the kind of device: `cpu` or `cuda` (ROCm builds call theirs `cuda` too).

    Raises NotCertified for what memfit has no step for.
    """
    if device.is_cpu:
        return "cpu"
    if device.vendor in ("NVIDIA", "AMD"):
        return "cuda"
    raise NotCertified(
        f"no certificate for `{device.id}`: memfit traces CPU and CUDA (ROCm) devices, not"
        f" {device.vendor}'s",
        hint="`memfit predict` gives the closed form",
    )


@contextmanager
def fake_device(device: Device) -> Iterator[FakeTensorMode]:
    """Make factories with this device's torch name give tensors without data.

    Raises NotCertified when this torch cannot imitate the device.
    """
    kind = device_type(device)
    with ExitStack() as stack:
        stack.enter_context(_foreach_on_fake_tensors())
        stack.enter_context(_numbers_from_fake_tensors())
        stack.enter_context(_module_apply())
        stack.enter_context(_huggingface_as_if_real())
        stack.enter_context(_no_initialisation())
        if kind == "cuda":
            stack.enter_context(_no_cuda_initialisation())
            install_guard()
            stack.enter_context(cuda_hooks())
            stack.enter_context(_cuda_autocast())
            stack.enter_context(cuda_kernels(device))
        stack.enter_context(_backward_on_this_thread())
        yield stack.enter_context(FakeTensorMode())


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while. NotCertified when this torch has no such attribute."""
    before = getattr(owner, name, _MISSING)
    if before is _MISSING:
        raise NotCertified(f"torch {torch.__version__} has no `{name}` in {owner!r}")
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_MISSING = object()


@contextmanager
def _foreach_on_fake_tensors() -> Iterator[None]:
    """Optimizers and clipping take their foreach path by exact type, and FakeTensor is not listed:

    without this the loop path would run and the foreach path's temporaries would not be seen.
    """
    lists: tuple[list[Any], ...] = (
        torch_optimizer._foreach_supported_types,
        foreach_utils._foreach_supported_types,
    )
    added = [(kinds, kind) for kinds in lists for kind in (FakeTensor, nn.Parameter)]
    added = [(kinds, kind) for kinds, kind in added if kind not in kinds]
    for kinds, kind in added:
        kinds.append(kind)
    try:
        yield
    finally:
        for kinds, kind in added:
            kinds.remove(kind)


@contextmanager
def _numbers_from_fake_tensors() -> Iterator[None]:
    """An optimizer without capturable state reads its step count with `.item()`: answer 1.

    It scales the update and changes no shape. Any other question about data (`if mask.all():`)
    would make the trace a guess, so it raises NotCertified with the line that asked.
    """
    operators = fake_impls.op_implementations_dict
    before = {}

    def answer(mode: FakeTensorMode, func: Any, tensor: FakeTensor) -> Any:
        del mode, func
        where = _who_asked()
        if where.parent.parts[-2:] == ("torch", "optim"):
            return 1.0
        raise NotCertified(f"the step depends on data: `{where}` reads a {tensor.dtype} tensor")

    for operator in (aten._local_scalar_dense.default, aten.item.default):
        if operator not in operators:
            raise NotCertified(f"torch {torch.__version__} answers `{operator}` elsewhere")
        before[operator] = operators[operator]
        operators[operator] = answer
    try:
        yield
    finally:
        operators.update(before)


def _who_asked() -> Path:
    """The source file of the nearest caller outside torch's tensor machinery, with its line."""
    frame = sys._getframe(2)
    machinery = (
        "torch/_subclasses",
        "torch/_ops",
        "torch/utils/_",
        "torch/_tensor",
        "memfit/train/live",
    )
    while frame.f_back is not None and any(m in frame.f_code.co_filename for m in machinery):
        frame = frame.f_back
    return Path(frame.f_code.co_filename) / str(frame.f_lineno)


@contextmanager
def _module_apply() -> Iterator[None]:
    """`Module.to` and its kin swap FakeTensor parameters, which their weak references forbid.

    A new parameter takes the old one's place instead, and ties survive where torch keeps them:
    when the device stays the same.
    """
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(p, FakeTensor) for p in self.parameters(recurse=recurse)):
            return original(self, fn, recurse)
        made: dict[int, Tensor] = {}
        for module in self.modules() if recurse else (self,):
            for tensors in (module._parameters, module._buffers):
                for name, old in tensors.items():
                    if old is not None:
                        tensors[name] = _applied(old, fn, made)
        return self

    with _set(nn.Module, "_apply", apply):
        yield


def _applied(old: Tensor, fn: Callable[[Tensor], Tensor], made: dict[int, Tensor]) -> Any:
    if id(old) in made:
        return made[id(old)]
    with torch.no_grad():
        new = fn(old)
    if new is old:
        return old
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    if new.device == old.device:
        made[id(old)] = new
    return new


@contextmanager
def _huggingface_as_if_real() -> Iterator[None]:
    """transformers takes a FakeTensor for tracing (compile, export) and goes other ways then."""
    import transformers.utils.import_utils as imports

    if not hasattr(imports, "is_fake_tensor"):
        yield
        return
    with _set(imports, "is_fake_tensor", lambda x: False):
        yield


@contextmanager
def _no_initialisation() -> Iterator[None]:
    """Initial values do not matter here, and `trunc_normal_` loops until the data suit it."""
    import transformers.initialization as huggingface

    with ExitStack() as stack:
        for module in (nn.init, huggingface):
            for name in _INITIALISERS:
                if hasattr(module, name):
                    stack.enter_context(_set(module, name, _unchanged))
        yield


_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "copy_",
    "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_",
)  # fmt: skip


def _unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


@contextmanager
def _no_cuda_initialisation() -> Iterator[None]:
    """With a GPU present, FakeTensorMode would start a context on it; a fake needs none."""
    with _set(FakeTensorMode, "avoid_device_init", property(lambda self: True)):
        yield


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    """`torch.autocast("cuda")` disables itself where no GPU is found."""
    with (
        _set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        _set(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
    ):
        yield


@contextmanager
def _backward_on_this_thread() -> Iterator[None]:
    """Autograd's CUDA thread would ask the driver for its device; and two threads have no order."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
