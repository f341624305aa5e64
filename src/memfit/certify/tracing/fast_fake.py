"""FakeTensorMode that remembers what an operator returned for arguments of the same metadata.

A step runs the same block dozens of times, and a process traces alike steps. torch's own cache of
fake results takes most of a trace's time to compute its keys, because it serves symbolic shapes and
subclasses too; here only plain fake tensors are described. Whatever is not plain goes to torch, as
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.certify.evidence.self_check import Proof

_PLAIN = frozenset(
    {
        int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
        torch.memory_format,
    }
)  # fmt: skip
# whose results follow from what `_describe` describes
_KNOWN = ("aten", "bitsandbytes", "mkldnn", "torch_attn")
_SEVERAL = (tuple, list)  # what holds the outputs of an operator that has several
# whose arguments say all, though none of them is a tensor
_FACTORIES = frozenset(
    {
        torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default,
        torch.ops.aten.zeros.default, torch.ops.aten.ones.default,
        torch.ops.aten.scalar_tensor.default,
    }
)  # fmt: skip
_HIDDEN_INPUTS = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)  # the result, or an argument's shape, depends on more than the arguments' metadata
# whose results depend on which kernels of attention are switched on: a trace's own choice
_BY_KERNELS = frozenset(
    id(operator)
    for operator in (
        torch.ops.aten._fused_sdp_choice.default,
        torch.ops.aten.scaled_dot_product_attention.default,
    )
)  # fmt: skip
# names for a profiler, which FSDP2 gives its parts: nothing of them is a tensor
_PROFILED = frozenset(
    id(operator)
    for operator in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)
MOST = 2**14  # answers that are shared by the traces of a process: about 50 MB
_OPERATORS: dict[int, Any] = {}  # those of the keys, whose identities stay theirs

_ENABLED: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled, torch._C._get_math_sdp_enabled, torch.is_grad_enabled,
)  # fmt: skip
_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at
_no_dispatch: Any = torch._C._DisableTorchDispatch


Answers = dict[Hashable, "_Answer | None"]  # None: ask torch each time


class FastFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Gives the tensors that FakeTensorMode gives, in a third of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.proofs: tuple[Proof, ...] = ()  # what was checked of this torch before it is used
        # operators whose results depend on values -> what a trace takes them as, of mode, arguments
        self.rules: dict[Any, Callable[..., Any]] = {}
        # shared by modes under which devices are imitated alike
        self.remembered: Answers = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while tracing; torch need not guard every call against it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """The operator's outputs: remembered, or torch's, which are then remembered."""
        if self.rules and func in self.rules:
            return self.rules[func](self, *args, **(kwargs or {}))
        if id(func) in _PROFILED:
            with _no_dispatch():
                return func(*args, **(kwargs or {}))
        tensors: list[FakeTensor] = []
        key = self._describe_call(func, args, kwargs, tensors)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        answer = self.remembered.get(key)
        if answer is not None:
            return answer.give(self, tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key not in self.remembered:
            if len(self.remembered) >= MOST:
                self.remembered.clear()
            self.remembered[key] = _learn(self, func, tensors, out)
            _OPERATORS[id(func)] = func
        return out

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator's outputs, for the dispatch of a mode that stands right above this one.

        A remembered answer comes at once: another dispatch would take as long as making it.
        """
        # nothing but this mode is below: no mode that wants to see the operator, too
        if _count_modes() == 1 and _mode_at(0) is self and not (self.rules and func in self.rules):
            tensors: list[FakeTensor] = []
            key = self._describe_call(func, args, kwargs, tensors)
            answer = None if key is None else self.remembered.get(key)
            if answer is not None:
                with _no_dispatch():
                    return answer.give(self, tensors)
        return func(*args, **kwargs)

    def _describe_call(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        tensors: list[FakeTensor],
    ) -> Hashable | None:
        """All that the results can depend on, and the tensors among it; None when that is not
        plain. Operators count by identity: hashing one runs Python.
        """
        described: list[Any] = [
            id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled(),
        ]  # fmt: skip
        if id(func) in _BY_KERNELS:
            described += (enabled() for enabled in _ENABLED)
        plain = self._describe(args, described, tensors)
        if plain and kwargs:
            described += kwargs
            plain = self._describe(kwargs.values(), described, tensors)
        return tuple(described) if plain and (tensors or func in _FACTORIES) else None

    def _describe(self, values: Any, described: list[Any], tensors: list[FakeTensor]) -> bool:
        """Append all that an operator's result can depend on; False when that is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                if value.dtype.is_complex:  # may be conjugated, which nothing below describes
                    return False
                tensors.append(value)
                described += (
                    value.shape, value.stride(), value.dtype, value.fake_device,
                    value.storage_offset(), value.layout, value.requires_grad,
                )  # fmt: skip
            elif kind in _PLAIN:
                described += (kind, value)  # 1, 1.0 and True are equal, and not alike
            elif kind is list or kind is tuple:
                described.append(len(value))
                if not self._describe(value, described, tensors):
                    return False
            else:
                return False
        return True


class _Output:
    """One output: a constant, an argument, a view of an argument, or new."""

    __slots__ = (
        "argument", "attributes", "constant", "device", "dtype", "offset", "shape", "stride",
    )  # fmt: skip

    def __init__(self, value: Any, tensors: Sequence[FakeTensor]) -> None:
        """Raises ValueError for what `give` could not repeat."""
        self.argument, self.constant, self.shape = -1, None, None
        # of the first tensor given, as torch set them, but for its mode
        self.attributes: dict[str, Any] = {}
        if type(value) is not FakeTensor:
            if value is not None and type(value) is not int:
                raise ValueError
            self.constant = value
            return
        same = [i for i, tensor in enumerate(tensors) if tensor is value]
        if same:
            if len(same) > 1:
                raise ValueError
            self.argument = same[0]
            return
        if value.constant is not None or value.dtype.is_complex or value.layout != torch.strided:
            raise ValueError
        self.shape, self.stride = tuple(value.shape), value.stride()
        self.dtype, self.device, self.offset = value.dtype, value.fake_device, 0
        storage = value.untyped_storage()._cdata
        if any(tensor.untyped_storage()._cdata == storage for tensor in tensors):
            if len(tensors) > 1:
                raise ValueError
            self.argument, self.offset = 0, int(value.storage_offset())

    def give(self, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Any:
        """Make it."""
        if self.shape is None:
            return self.constant if self.argument < 0 else tensors[self.argument]
        new = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.argument >= 0:
            storage = tensors[self.argument].untyped_storage()
            new.set_(storage, self.offset, self.shape, self.stride)
        if not self.attributes:
            made = FakeTensor(mode, new, self.device)
            self.attributes = {k: v for k, v in made.__dict__.items() if k != "fake_mode"}
            return made
        # The same without the constructor's checks, which take a fifth of a trace.
        made = Tensor._make_subclass(
            FakeTensor, new, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self.attributes, fake_mode=mode)
        return made


class _Answer:
    """All outputs of an operator for one description of its arguments."""

    __slots__ = ("_made", "_outputs", "_single")

    def __init__(self, outputs: Sequence[_Output], made: type) -> None:
        self._outputs, self._made = outputs, made
        self._single = made not in _SEVERAL

    def give(self, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Any:
        """The outputs, new tensors where they are new."""
        if self._single:
            return self._outputs[0].give(mode, tensors)
        return self._made(output.give(mode, tensors) for output in self._outputs)


def _learn(
    mode: FakeTensorMode, func: Any, tensors: Sequence[FakeTensor], out: Any
) -> _Answer | None:
    """The answer to give from now on; None when it would not be the same as torch's."""
    if getattr(func, "namespace", "") not in _KNOWN or _HIDDEN_INPUTS & set(func.tags):
        return None
    several = type(out) in _SEVERAL
    outputs = out if several else (out,)
    try:
        answer = _Answer([_Output(value, tensors) for value in outputs], type(out))
    except ValueError:
        return None
    answer.give(mode, tensors)  # the first is torch's own; the ones after it are compared
    repeated = answer.give(mode, tensors)
    pairs = zip(outputs, repeated if several else (repeated,), strict=True)
    return answer if _distinct(outputs, tensors) and all(_alike(a, b) for a, b in pairs) else None


def _distinct(outputs: Sequence[Any], tensors: Sequence[FakeTensor]) -> bool:
    """Whether no two outputs share a storage, but for that of an argument which they view."""
    inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
    storages = [t.untyped_storage()._cdata for t in outputs if isinstance(t, Tensor)]
    storages = [storage for storage in storages if storage not in inputs]
    return len(set(storages)) == len(storages)


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return (
        torch._C._dispatch_key_set(a) == torch._C._dispatch_key_set(b)
        and a.__dict__ == b.__dict__
        and a.storage_offset() == b.storage_offset()
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and a.requires_grad == b.requires_grad
    )
