"""Faults put into the certificate on purpose: a check that exists reports each of them.

Each check gives 0 for the code as it is, and something else with the fault.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny_steps import CPU, H100, make_recipe, watch_real_step
from torch.nn.attention import SDPBackend

from memfit.allocator.caching import CachingAllocator, Settings
from memfit.certify import trace
from memfit.certify.tracing import cuda_kernels, fake_device
from memfit.certify.tracing.recorder import Recorder
from memfit.certify.tracing.trace_step import worst_shapes
from memfit.core.errors import NotCertified
from memfit.core.units import KIB, MIB
from memfit.records.ledger import Kind, Phase
from memfit.train.measure.live import LiveBytes
from memfit.train.step import build

BF16 = {"precision": "bf16", "base_format": "bf16"}
TOKENS, VOCAB, HIDDEN, FFN, HEADS, KV = 96, 250, 64, 176, 4, 32


def real_and_fake() -> int:
    """Exactness: certified minus measured peaks of a step on this CPU, all phases."""
    recipe = make_recipe()
    fake = trace(recipe, CPU).phases
    real = watch_real_step(recipe, worst_shapes(recipe)).peaks
    return sum(abs(fake[p] - n) for p, n in real.items() if p is not Phase.LOAD)


def saved_by_blocks() -> int:
    """Closed form: what a third block keeps beside two."""
    n, h = TOKENS, HIDDEN
    block = 20 * n * h + 4 * n * KV + 8 * n * FFN + 4 * n * HEADS + 8 * n + 24
    config = make_recipe().model.config
    recipes = (make_recipe(config={**config, "num_hidden_layers": k}, **BF16) for k in (2, 3))
    two, three = (trace(r, H100).ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS] for r in recipes)
    return three - two - block


def logits_in_backward() -> int:
    """Closed form: 12 bytes a token and word."""
    kinds = trace(make_recipe(**BF16), H100).ledger.by_kind(Phase.BACKWARD)
    return kinds.get(Kind.LOGITS, 0) - 12 * TOKENS * VOCAB


def blocks_by_hand() -> int:
    """Hand-worked: of 12 MiB cached, 11.5 MiB take all and 10.5 MiB leave 1.5 MiB."""

    def allocated(nbytes: int) -> int:
        device = CachingAllocator(Settings())
        device.allocate(0, 12 * MIB)
        device.free(0)
        device.allocate(1, nbytes)
        return device.allocated

    most, least = allocated(11 * MIB + 512 * KIB), allocated(10 * MIB + 512 * KIB)
    return abs(most - 12 * MIB) + abs(least - 10 * MIB - 512 * KIB)


def refused() -> int:
    """The self-check: 1 when it refuses."""
    fake_device._PROVED.clear()
    try:
        with fake_device.fake_device(H100):
            return 0
    except NotCertified:
        return 1


def drop_an_allocation(patch: pytest.MonkeyPatch) -> None:
    allocate = Recorder._allocate

    def dropped(self: Recorder, nbytes: int, op: str, *rest: Any, **more: Any) -> int:
        return allocate(self, 0 if op.startswith("silu.") else nbytes, op, *rest, **more)

    patch.setattr(Recorder, "_allocate", dropped)


def drop_it_everywhere(patch: pytest.MonkeyPatch) -> None:
    allocate = LiveBytes._allocate

    def dropped(self: LiveBytes, nbytes: int, op: str, *rest: Any, **more: Any) -> int:
        return allocate(self, 0 if op.startswith("silu.") else nbytes, op, *rest, **more)

    patch.setattr(LiveBytes, "_allocate", dropped)


def swap_the_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_kernels, "attention_backend", lambda *_, **__: SDPBackend.MATH)


def swap_the_kernel_unchecked(patch: pytest.MonkeyPatch) -> None:
    swap_the_kernel(patch)
    patch.setattr(fake_device, "check_imitation", lambda *_, **__: ())


def forget_the_logits(patch: pytest.MonkeyPatch) -> None:
    allocate = Recorder._allocate

    def forgotten(self: Recorder, nbytes: int, op: str, kind: Any, vocab: bool, *rest: Any) -> int:
        return allocate(self, 0 if vocab else nbytes, op, kind, vocab, *rest)

    patch.setattr(Recorder, "_allocate", forgotten)


def split_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CachingAllocator, "_should_split", lambda self, pool, size, rest: rest >= 512)


def split_too_little(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CachingAllocator, "_should_split", lambda self, pool, size, rest: False)


def double_a_block(patch: pytest.MonkeyPatch) -> None:
    """In the trace alone."""
    made = build.build_model

    def doubled(recipe: Any, device: Any, *rest: Any, **more: Any) -> Any:
        model = made(recipe, device, *rest, **more)
        block = build.parts(model).blocks[1]
        once = block.forward
        block.forward = lambda hidden, **kwargs: once(once(hidden, **kwargs), **kwargs)
        return model

    patch.setattr("memfit.certify.tracing.trace_step.build_model", doubled)


FAULTS = {
    "drop an allocation": (drop_an_allocation, real_and_fake),
    "drop an allocation, also when measured": (drop_it_everywhere, saved_by_blocks),
    "swap the attention kernel": (swap_the_kernel, refused),
    "swap the kernel behind the self-check": (swap_the_kernel_unchecked, saved_by_blocks),
    "forget the logits": (forget_the_logits, logits_in_backward),
    "split blocks too often": (split_too_much, blocks_by_hand),
    "split blocks too seldom": (split_too_little, blocks_by_hand),
    "double a block": (double_a_block, real_and_fake),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(monkeypatch, name: str) -> None:
    break_it, check = FAULTS[name]
    monkeypatch.setattr(fake_device, "_PROVED", {})
    assert check() == 0
    break_it(monkeypatch)
    if check is saved_by_blocks and break_it is drop_it_everywhere:
        monkeypatch.setattr(fake_device, "check_imitation", lambda *_, **__: ())
    assert check() != 0
