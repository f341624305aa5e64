"""What FastFakeMode remembers is what torch's own FakeTensorMode would have answered."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from tiny_steps import CPU, FAMILIES, H100, make_recipe, possible
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.certify import trace as trace_now
from memfit.certify.tracing import fake_device
from memfit.certify.tracing.fast_fake import Answers, FastFakeMode, _Answer
from memfit.core.errors import NotCertified
from memfit.records.hardware import Device
from memfit.records.recipe import Freeze, Recipe

CPU_ = torch.device("cpu")
BF16 = {"precision": "bf16", "base_format": "bf16"}
MIXED = {"precision": "bf16-mixed"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {**BF16, "accumulation": 2, "implementation": "foreach"},
    "mixed-recompute-packed": {**MIXED, "recompute_blocks": 3, "packing": True},
    "lora-mixed": {"method": "lora", **MIXED, "base_format": "bf16", "recompute_blocks": 1},
    "freeze-chunked": {
        "method": "freeze", "freeze": Freeze(last_blocks=1), **BF16,
        "loss": "chunked", "loss_chunk": 20, "implementation": "loop",
    },
    "math": {**BF16, "attention": "math"},
}  # fmt: skip


def trace(recipe: Recipe, device: Device) -> tuple[Any, ...]:
    """All that a trace says."""
    traced = trace_now(recipe, device)
    return traced.phases, traced.ledger, traced.tape, traced.marks, traced.at_peak


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        (family, variant)
        for family, variant in zip(FAMILIES, cycle(VARIANTS), strict=False)
        if possible(family, VARIANTS[variant])
    ],
)
def test_a_trace_is_the_same_with_torchs_own_mode(monkeypatch, family: str, variant: str) -> None:
    recipe = make_recipe(family, **VARIANTS[variant])
    fast = trace(recipe, H100)
    monkeypatch.setattr(fake_device, "FastFakeMode", FakeTensorMode)
    assert trace(recipe, H100) == fast


def test_also_on_a_cpu(monkeypatch) -> None:
    recipe = make_recipe("gpt2", accumulation=2, recompute_blocks=1)
    fast = trace(recipe, CPU)
    monkeypatch.setattr(fake_device, "FastFakeMode", FakeTensorMode)
    assert trace(recipe, CPU) == fast


def test_a_wrong_answer_is_not_remembered(monkeypatch) -> None:
    recipe = make_recipe()
    right = trace(recipe, CPU)
    give = _Answer.give

    def wider(self: _Answer, mode: FakeTensorMode, tensors: list[FakeTensor]) -> Any:
        out = give(self, mode, tensors)
        if isinstance(out, FakeTensor) and out.dim() == 3 and out.dtype is torch.float32:
            return FakeTensor(mode, torch.empty_like(out, dtype=torch.float64, device="meta"), CPU_)
        return out

    monkeypatch.setattr(_Answer, "give", wider)
    monkeypatch.setattr("memfit.certify.tracing.fake_device._KNOWN", {})
    assert trace(recipe, CPU) == right  # it is compared before it is remembered
    monkeypatch.setattr("memfit.certify.tracing.fast_fake._alike", lambda a, b: True)
    monkeypatch.setattr("memfit.certify.tracing.fake_device._PROVED", {})
    monkeypatch.setattr("memfit.certify.tracing.fake_device._KNOWN", {})
    with pytest.raises(NotCertified, match="does not imitate"):
        trace(recipe, CPU)


def count_asked(monkeypatch, recipe: Recipe) -> int:
    """How often a trace of it asks torch."""
    asked = []
    plain = FakeTensorMode.__torch_dispatch__

    def ask(*arguments: Any) -> Any:
        asked.append(arguments[1])
        return plain(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(FakeTensorMode, "__torch_dispatch__", ask)
        trace(recipe, CPU)
    return len(asked)


def test_a_trace_asks_torch_what_no_earlier_one_has_asked(monkeypatch) -> None:
    monkeypatch.setattr("memfit.certify.tracing.fake_device._KNOWN", {})
    first = count_asked(monkeypatch, make_recipe())
    assert count_asked(monkeypatch, make_recipe(accumulation=2)) < first / 4
    assert count_asked(monkeypatch, make_recipe(sequence_length=40)) > first / 3


def test_what_is_remembered_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("memfit.certify.tracing.fast_fake.MOST", 3)
    with FastFakeMode() as mode:
        for rows in range(1, 9):
            assert (torch.empty(rows, 2) * 2).shape == (rows, 2)
            assert len(mode.remembered) <= 3


def test_the_choice_of_a_kernel_is_remembered_with_the_kernels_that_may_be_chosen() -> None:
    """torch chooses by switches that are no argument."""
    known: Answers = {}
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kernel), FastFakeMode() as mode:
            mode.remembered = known
            x = torch.empty(1, 2, 8, 16)
            torch._fused_sdp_choice(x, x, x, is_causal=True)
    choice = id(torch.ops.aten._fused_sdp_choice.default)
    assert len([key for key in known if key[0] == choice]) == 2


def metadata(tensor: torch.Tensor) -> tuple:
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, type(tensor),
    )  # fmt: skip


CALLS: dict[str, Any] = {
    "int or float": lambda x: (x.to(torch.int64) + 1, x.to(torch.int64) + 1.0),
    "views": lambda x: (x.t(), x[1:], x[2:, ::2], x.expand(2, 4, 6), x.view(6, 4), x.detach()),
    "two outputs": lambda x: torch.max(x, 1),
    "views in a list": lambda x: torch.split(x, 2),
    "views in a tuple": lambda x: x.unbind(0),
    "in place": lambda x: (x.add_(1), x.mul_(2)),
    "the same argument twice": lambda x: (x * x, torch.addmm(x, x[:, :4], x)),
    "another layout": lambda x: (x.t() * 2, x.clone(), x.t().clone(), torch.empty_like(x.t())),
    "nothing to go by": lambda x: (torch.zeros(3), torch.tensor(2.0), torch.tensor([1.0]) * 2),
    "a wrong call": lambda x: x @ x,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_given_again_is_torchs(name: str) -> None:
    def answers(mode: FakeTensorMode) -> list[Any]:
        found: list[Any] = []
        with mode:
            for _ in range(3):
                x = torch.empty(4, 6)
                try:
                    out = CALLS[name](x)
                except RuntimeError as error:
                    found.append(type(error))
                    continue
                for tensor in out:
                    shared = tensor.untyped_storage()._cdata == x.untyped_storage()._cdata
                    found.append((metadata(tensor), shared, tensor is x))
        return found

    assert answers(FastFakeMode()) == answers(FakeTensorMode())


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator through the mode below, at once or by another dispatch."""

    def __init__(self, run: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run, self.seen = run, list[str]()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return self.run(func, args, kwargs or {}) if self.run else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_what_is_given_at_once_is_what_a_dispatch_gives(name: str) -> None:
    def answers(at_once: bool) -> list[Any]:
        found: list[Any] = []
        with FastFakeMode() as mode, Watching(mode.run if at_once else None):
            for _ in range(4):
                x = torch.empty(4, 6)
                try:
                    out = CALLS[name](x)
                except RuntimeError as error:
                    found.append(type(error))
                    continue
                for tensor in out:
                    keys = torch._C._dispatch_key_set(tensor)
                    shared = tensor.untyped_storage()._cdata == x.untyped_storage()._cdata
                    own = {k: v for k, v in tensor.__dict__.items() if k != "fake_mode"}
                    found.append((metadata(tensor), str(keys), own, shared))
                    assert tensor.fake_mode is mode
        return found

    assert answers(at_once=True) == answers(at_once=False)


def test_what_is_known_is_given_without_another_dispatch(monkeypatch) -> None:
    with FastFakeMode() as mode, Watching(mode.run):
        x = torch.empty(4, 6)
        _ = x * 2
        monkeypatch.setattr(FastFakeMode, "__torch_dispatch__", None)  # from now on it fails
        assert (x * 2).shape == (4, 6)


def test_a_mode_in_between_sees_all_operators() -> None:
    with FastFakeMode() as mode, Watching() as between, Watching(mode.run) as above:
        for _ in range(3):
            x = torch.empty(4, 6)
            _ = x * 2
    assert between.seen == above.seen
    assert len(above.seen) == 6


def test_a_mode_that_is_switched_off_gives_no_factory_an_answer() -> None:
    with FastFakeMode() as mode, Watching(mode.run):
        torch.zeros(3)
        torch.zeros(3)
        with unset_fake_temporarily():
            assert type(torch.zeros(3)) is torch.Tensor


def test_what_is_remembered_is_used() -> None:
    with FastFakeMode() as mode:
        x = torch.empty(4, 6)
        first = x * 2
        known = len(mode.remembered)
        again = x * 2
        assert len(mode.remembered) == known > 0
    assert first.untyped_storage()._cdata != again.untyped_storage()._cdata


def test_results_that_depend_on_values_are_never_remembered() -> None:
    with FastFakeMode() as mode:
        x = torch.empty(4, 6)
        for _ in range(2):
            with pytest.raises(Exception, match=r"nonzero|data-dependent|DynamicOutput"):
                torch.nonzero(x)
        y = torch.empty(4, 6)
        y.t_()
        y.t_()
        assert y.shape == (4, 6)
        answers = {key[0]: answer for key, answer in mode.remembered.items()}
        assert answers.pop(id(torch.ops.aten.empty.memory_format)) is not None
        assert set(answers.values()) <= {None}


def test_views_in_a_list_and_new_tensors_are_remembered() -> None:
    with FastFakeMode() as mode:
        torch.split(torch.empty(4, 6), 2)
        torch.zeros(3)
        known = {key[0]: answer for key, answer in mode.remembered.items()}
    aten = torch.ops.aten
    for operator in (aten.empty.memory_format, aten.zeros.default, aten.split.Tensor):
        assert known[id(operator)] is not None, operator
