"""A rank of accelerate's FSDP1 that trains all weights, predicted, against its own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fsdp_ranks import (
    NEOX,
    RANKS,
    ROWS,
    TOKENS,
    Level,
    accelerator,
    highest,
    ledger,
    make_model,
    make_neox,
    make_plugin,
    rise,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import masking_utils

from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.world import fake_world
from memfit.plan.request.problem import find_device
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel

H100 = find_device("h100-sxm")
SCALARS = 64  # bytes: the loss, and the rotary table's cast
MIXED = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make(
    patch: pytest.MonkeyPatch, vocab: int, mixed: str, dtype: torch.dtype,
    reentrant: bool | None = None, tied: bool = False, whole: Any = None, **keys: Any,
) -> Any:  # fmt: skip
    """`Accelerator.prepare_model`: autocast around the class, fp32 outputs, FSDP, fp32 shards."""
    from accelerate import accelerator as module

    def autocast(native: bool, _: Any) -> Any:  # the original asks a state of all processes
        return torch.autocast("cpu", DTYPES.get(mixed), enabled=native)

    patch.setattr(module, "get_mixed_precision_context_manager", autocast)
    plugin = make_plugin(1, mixed, backward_prefetch="BACKWARD_PRE", **keys)
    told: Any = accelerator(plugin, mixed)
    return module.Accelerator.prepare_model(
        told,
        whole or make_model(vocab, dtype=dtype, reentrant=reentrant, tied=tied),
        device_placement=False,
    )


def on_host(patch: pytest.MonkeyPatch) -> None:
    """What offloading asks of a device: pinned memory, and a stream to wait for."""
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)


def held_by(model: Any) -> list[torch.Tensor]:
    """Shards; of those on the host their gradients, too."""
    flat = [m._handle.flat_param for m in FullyShardedDataParallel.fsdp_modules(model)]
    away = [p._cpu_grad for p in flat if hasattr(p, "_cpu_grad")]
    return [*(p._local_shard for p in flat), *away, *model.buffers()]


def waits(model: Any) -> Callable[[bool], Any]:
    """As `Accelerator.no_sync`."""
    return lambda last: nullcontext() if last else model.no_sync()


@pytest.mark.parametrize(
    ("mixed", "dtype", "vocab", "accumulation", "changes"),
    [
        ("bf16", torch.float32, 96, 1, {}),
        ("bf16", torch.bfloat16, 768, 2, {"use_orig_params": True}),
        ("bf16", torch.float32, 96, 1, {"activation_checkpointing": True}),
        ("bf16", torch.float32, 96, 1, {"reentrant": True}),
        ("bf16", torch.float32, 768, 2, {"reentrant": True, "tokens": 4}),
        ("bf16", torch.float32, 96, 2, {"cpu_offload": True}),
        ("bf16", torch.float32, 768, 1, {"cpu_offload": True, "tokens": 4}),
        ("no", torch.float32, 96, 1, {"cpu_offload": True}),
        ("no", torch.bfloat16, 768, 2, {"cpu_offload": True, "tokens": 4}),
        ("fp16", torch.float32, 96, 1, {}),
        ("no", torch.float32, 96, 1, {}),
        ("bf16", torch.float32, 768, 1, {"tied": True}),
        ("no", torch.bfloat16, 768, 3, {"tokens": 4, "ranks": 8}),
        ("bf16", torch.float32, 97, 1, {"tokens": 4, "ranks": 3}),
        ("bf16", torch.float32, 96, 1, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("no", torch.float32, 768, 2, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("bf16", torch.float32, 96, 2, {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True}),
    ],
)
def test_a_rank_holds_what_flat_units_hold(
    monkeypatch: pytest.MonkeyPatch, mixed: str, dtype: torch.dtype, vocab: int,
    accumulation: int, changes: dict[str, Any],
) -> None:  # fmt: skip
    """At the highest instant: in a block, in the loss, or where the root's gradients are joined."""
    shape = {"tokens": changes.pop("tokens", 40), "ranks": changes.pop("ranks", RANKS)}
    mine = ledger(
        vocab, accumulation, version=1, method="full", tied="tied" in changes, **shape,
        precision="bf16" if mixed == "no" and dtype == torch.bfloat16 else MIXED[mixed],
        recompute="full" if {"activation_checkpointing", "reentrant"} & changes.keys() else "none",
        options={"fsdp_version": 1, "reentrant": "reentrant" in changes},
        offload="parameters" if "cpu_offload" in changes else "none",
        parallel={"dp_shard": shape["ranks"], "zero": 2 if "sharding_strategy" in changes else 3},
    )  # fmt: skip
    if "cpu_offload" in changes:
        on_host(monkeypatch)
    world = Parallel(dp_shard=shape["ranks"])
    with fake_world(world, 0, "cpu", lambda _: None, lambda *_: None):
        model = make(monkeypatch, vocab, mixed, dtype, **changes)
        theirs = highest(
            model, lambda: held_by(model), waits(model), accumulation, tokens=shape["tokens"]
        )
    assert rise(mine) == pytest.approx(theirs, abs=SCALARS)


def kept_by(patch: pytest.MonkeyPatch, autocast: bool) -> int:
    """Bytes that a forward of 16-bit weights leaves on a device that is not here."""
    # the class looks into the rows' positions, of which there is one sequence each
    patch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with fake_device(H100) as mode:
        mode.allow_non_fake_inputs = True
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                model = make_neox()
        finally:
            torch.set_default_dtype(torch.float32)
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="cuda")
        labels = ids.clone()
        known = [*model.parameters(), *model.buffers(), ids, labels]
        with Level(*known, device="cuda") as level:
            with torch.autocast("cuda", torch.bfloat16, autocast, cache_enabled=False):
                loss = model(input_ids=ids, labels=labels).loss
            alive = [one() for one in level.alive.values() if one is not None]
            assert loss.requires_grad
            return sum(storage.nbytes() for storage in alive if storage is not None)


def test_version_1_is_autocast_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch's runs this family's norms in fp32; to one tensor at the loss's highest."""
    wide, narrow = (
        ledger(96, version=version, method="full", model=NEOX, device="h100-sxm")
        .by_kind(Phase.LOSS)[Kind.ACTIVATIONS]
        for version in (1, 2)
    )  # fmt: skip
    hidden = 4 * ROWS * TOKENS * NEOX["hidden_size"]
    theirs = kept_by(monkeypatch, True) - kept_by(monkeypatch, False)
    assert wide - narrow == pytest.approx(theirs, abs=hidden)


def test_blocks_of_another_family(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ledger(96, version=1, method="full", model=NEOX)
    with fake_world(Parallel(dp_shard=RANKS), 0, "cpu", lambda _: None, lambda *_: None):
        model = make(monkeypatch, 96, "bf16", torch.float32, whole=make_neox())
        theirs = highest(model, lambda: held_by(model), waits(model), 1)
    assert rise(mine) == pytest.approx(theirs, abs=SCALARS)


def test_bitsandbytes_updates_shards_that_are_on_the_host() -> None:
    """Where they are, and its states beside them: the device holds none."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    shard = torch.nn.Parameter(torch.ones(2**14))
    shard.grad = torch.ones_like(shard)
    optimizer = bitsandbytes.optim.AdamW8bit([shard], lr=0.5)
    optimizer.step()
    states = [t for t in optimizer.state[shard].values() if torch.is_tensor(t)]
    assert shard.max() < 1
    assert {t.device.type for t in states} == {"cpu"}
    away = ledger(
        96, version=1, method="full", offload="parameters", device="h100-sxm",
        optimizer={"name": "adamw8bit"},
    )  # fmt: skip
    assert Kind.OPTIMIZER_STATE not in away.by_kind(Phase.OPTIMIZER_STEP)


def test_shards_and_states_are_fp32_and_of_flat_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights loaded in 16 bits, too; and on the host where they are offloaded."""
    mine = ledger(96, version=1, method="full")
    with fake_world(Parallel(dp_shard=RANKS), 0, "cpu", lambda _: None, lambda *_: None):
        model = make(monkeypatch, 96, "bf16", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        highest(model, lambda: held_by(model), waits(model), 1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        shards = sum(p.nbytes for p in model.parameters())
        states = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    found = mine.by_kind(Phase.FORWARD)
    rotary = sum(e.nbytes for e in mine.at(Phase.FORWARD) if e.owner == "rotary")
    assert found[Kind.PARAMETERS] - rotary == pytest.approx(shards, rel=0.01)
    assert found[Kind.OPTIMIZER_STATE] == pytest.approx(states, rel=0.01)
    away = ledger(96, version=1, method="full", offload="parameters")
    for phase in (Phase.FORWARD, Phase.OPTIMIZER_STEP):
        assert away.by_kind(phase)[Kind.PARAMETERS] == rotary
        assert not {Kind.OPTIMIZER_STATE, Kind.GRADIENTS} & away.by_kind(phase).keys()
