"""Tensors of a device that is not here: the trainer's own code runs on them, nothing is computed.

`FakeTensorMode` gives tensors with shape, dtype and device and no data. That alone runs a CPU step.
For a step of a CUDA device, on any torch (built without CUDA, or with it and no GPU, or with one),
each function below undoes one place where torch would notice that the device is not here, and says
which. All are undone when the context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.certify.evidence.self_check import HEAD_DIM, Proof, check_imitation
from memfit.certify.tracing.cuda_guard import cuda_hooks, install_guard
from memfit.certify.tracing.cuda_kernels import cuda_kernels
from memfit.certify.tracing.fast_fake import Answers, FastFakeMode
from memfit.certify.tracing.partitioned import Partitioned
from memfit.core.errors import NotCertified
from memfit.meta.attending.kernels import Heads, refusal
from memfit.records.hardware import Device


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
def fake_device(device: Device) -> Iterator[FastFakeMode]:
    """Make factories with this device's torch name give tensors without data.

    Raises NotCertified when this torch cannot imitate the device.
    """
    kind = device_type(device)
    with ExitStack() as stack:
        stack.enter_context(_foreach_on_fake_tensors())
        stack.enter_context(set_while(torch, "compile", _compiler()))
        stack.enter_context(set_while(torch.amp.GradScaler, "_maybe_opt_step", _never_skip))
        stack.enter_context(_grouped_products())
        stack.enter_context(kernels_strides())
        stack.enter_context(_numbers_of_updates())
        if kind == "cuda":
            stack.enter_context(_no_cuda_initialisation())
            install_guard()
            stack.enter_context(cuda_hooks())
            stack.enter_context(_cuda_autocast())
            stack.enter_context(_no_cuda_generator())
            # bitsandbytes waits for the device after each update
            stack.enter_context(set_while(torch.cuda, "synchronize", lambda device=None: None))
            stack.enter_context(cuda_kernels(device))
        stack.enter_context(_backward_on_this_thread())
        mode = stack.enter_context(FastFakeMode())
        mode.remembered = _KNOWN.setdefault(_like(device), {})
        mode.proofs = _prove(device, kind)
        yield mode


_Like = tuple[str, tuple[int, int] | None]  # what the imitation of a device reads of it
_PROVED: dict[_Like, tuple[Proof, ...]] = {}  # what this process has proved of torch's imitation
_KNOWN: dict[_Like, Answers] = {}  # what operators return there: learned in one trace, or another


def _like(device: Device) -> _Like:
    return device.platform, device.capability


def _prove(device: Device, kind: str) -> tuple[Proof, ...]:
    """The self-check inside the fake device, once in a process for all devices that are alike."""
    like = _like(device)
    if like not in _PROVED:
        flash = not refusal("flash", "bfloat16", Heads(HEAD_DIM), capability=device.capability)
        _PROVED[like] = check_imitation(kind, flash=flash)
    return _PROVED[like]


@contextmanager
def set_while(owner: Any, name: str, value: Any) -> Iterator[None]:
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
def _grouped_products() -> Iterator[None]:
    """torch's shape rule of a grouped product refuses all dtypes but bf16, which its kernels do

    not: fp32 and fp16 are multiplied group by group (aten/src/ATen/native/GroupedMMUtils.h).
    """
    product = torch.ops.aten._grouped_mm.default
    if fake_impls._is_op_registered_to_fake_rule(product):
        raise NotCertified(f"torch {torch.__version__} has a rule of its own for {product}")
    fake_impls.register_op_impl(product)(_grouped_product)
    try:
        yield
    finally:
        fake_impls._deregister_op_impl(product)


def _grouped_product(
    mode: FakeTensorMode, _: Any, x: Tensor, weight: Tensor, offs: Tensor, *options: Any
) -> Tensor:
    """(rows, k) x (groups, k, n) -> (rows, n), and (m, rows) x (rows, n) -> (groups, m, n)."""
    summed = weight.dim() == 2  # over the rows of each group
    shape = (*offs.shape, x.shape[0], weight.shape[1]) if summed else (x.shape[0], weight.shape[2])
    with mode:
        return torch.empty(shape, dtype=x.dtype, device=x.device)


@contextmanager
def kernels_strides() -> Iterator[None]:
    """Give softplus's gradient the strides of torch's kernels.

    What torch decomposes it into lies row-major; the kernels' result lies as the gradient does,
    which decides whether the product behind it makes a copy.
    """
    from torch._decomp import decomposition_table  # which torch imports with its first fake tensor

    slope = torch.ops.aten.softplus_backward.default
    if slope not in decomposition_table or fake_impls._is_op_registered_to_fake_rule(slope):
        raise NotCertified(f"torch {torch.__version__} has another rule for {slope}")
    decomposed = decomposition_table.pop(slope)
    fake_impls.register_op_impl(slope)(_slope_of_softplus)
    try:
        yield
    finally:
        fake_impls._deregister_op_impl(slope)
        decomposition_table[slope] = decomposed


def _slope_of_softplus(
    mode: FakeTensorMode, _: Any, grad: Tensor, x: Tensor, *numbers: Any
) -> Tensor:
    """One kernel over both, as their product is."""
    with mode:
        return grad * x


def _never_skip(_: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
    """The scaler would read from the device whether gradients are finite. A skipped step holds
    less than one that is taken.
    """
    return optimizer.step(*args, **kwargs)


@contextmanager
def _numbers_of_updates() -> Iterator[None]:
    """Adafactor reads norms and counters from the device; they scale its update, and no size.

    Inside an optimizer's step they are 1; anywhere else a fake tensor still has no number.
    """
    running: list[Any] = []
    plain = Tensor.item

    def item(tensor: Tensor) -> Any:
        return 1.0 if running and isinstance(tensor, FakeTensor) else plain(tensor)

    begun = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: running.append(1))
    ended = torch_optimizer.register_optimizer_step_post_hook(lambda *_: running.pop())
    try:
        with set_while(Tensor, "item", item):
            yield
    finally:
        begun.remove()
        ended.remove()


def _compiler() -> Callable[..., Any]:
    """What `torch.compile` is meanwhile: see `_leave_out` and `partitioned`."""
    graphs: dict[Hashable, Any] = {}

    def compile(function: Any = None, **options: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), nn.Module):  # a block's forward
            return Partitioned(function, options.get("options", {}), graphs)
        return _leave_out(function, **options)

    return compile


def _leave_out(function: Any = None, **_: Any) -> Any:
    """A compiled update of an optimizer writes in place and returns nothing: nothing of it lasts.

    What its kernels hold meanwhile is not known here; the certificate's bounds say so.
    """
    if function is None:
        return _leave_out
    return lambda *arguments: None


@contextmanager
def _no_cuda_initialisation() -> Iterator[None]:
    """With a GPU present, FakeTensorMode would start a context on it; a fake needs none."""
    with set_while(FakeTensorMode, "avoid_device_init", property(lambda self: True)):
        yield


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    """`torch.autocast("cuda")` disables itself where no GPU is found."""
    with (
        set_while(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        set_while(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
    ):
        yield


@contextmanager
def _no_cuda_generator() -> Iterator[None]:
    """Seeding and `fork_rng` ask the driver for a generator's state, which lives on the host."""
    with (
        set_while(torch.cuda, "get_rng_state", lambda device=0: None),
        set_while(torch.cuda, "set_rng_state", lambda state, device=0: None),
        set_while(torch.cuda, "manual_seed_all", lambda seed: None),
    ):
        yield


@contextmanager
def _backward_on_this_thread() -> Iterator[None]:
    """Autograd's CUDA thread would ask the driver for its device; and two threads have no order."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
