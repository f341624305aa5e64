"""A rank of accelerate's FSDP2, predicted, against what its own code and torch's hold on a CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp_ranks import (
    LORA,
    NEOX,
    RANKS,
    accelerator,
    highest,
    ledger,
    make_model,
    make_neox,
    make_plugin,
    rise,
)
from torch.distributed.device_mesh import init_device_mesh

from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.world import fake_world
from memfit.core.errors import InvalidRequest
from memfit.meta.losses import tiled
from memfit.meta.meter import block_size
from memfit.plan.request.problem import find_device
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.recipe import Parallel

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import trl_units

RECORDED = json.loads(trl_units.OUT.read_text())
UNITS = RECORDED["rows"]
SCALARS = 16  # bytes
MASKED = 400  # what indexing by a mask allocates inside its kernels
WORLD = Parallel(dp_shard=RANKS)
OVER_BF16 = LORA | {"base_format": "bf16"}


def waits(model: Any) -> Callable[[bool], Any]:
    """As `Accelerator.no_sync`."""

    @contextmanager
    def syncs(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    return syncs


def local(model: Any) -> list[torch.Tensor]:
    return [*(p.to_local() for p in model.parameters()), *model.buffers()]


def prepare(model: Any, *, reshards: bool = True) -> Any:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    told = accelerator(make_plugin(2, reshard_after_forward=reshards), "bf16")
    return fsdp2_prepare_model(told, model)


def real_rise(vocab: int, *, accumulation: int, reshards: bool = True, **told: Any) -> int:
    model = prepare(make_model(vocab, **told), reshards=reshards)
    return highest(model, lambda: local(model), waits(model), accumulation)


@pytest.mark.parametrize(
    ("lora", "accumulation", "vocab", "tied"),
    [
        (False, 1, 96, False), (False, 2, 96, False), (False, 1, 768, False), (True, 1, 96, False),
        (True, 2, 768, False), (False, 1, 768, True), (True, 2, 768, True),
    ],
)  # fmt: skip
def test_a_rank_holds_what_accelerates_own_units_hold(
    lora: bool, accumulation: int, vocab: int, tied: bool
) -> None:
    """At the highest instant: in a block, or, with many words, in the loss."""
    changes = OVER_BF16 if lora else {"method": "full"}
    mine = rise(ledger(vocab, accumulation, version=2, tied=tied, **changes))
    with fake_world(WORLD, 0, "cpu", lambda _: None, lambda *_: None):
        theirs = real_rise(vocab, lora=lora, accumulation=accumulation, tied=tied)
    assert mine == pytest.approx(theirs, abs=SCALARS)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("accumulation", "vocab"), [(1, 96), (2, 96), (1, 768)])
def test_weights_that_stay_whole_after_the_forward(
    recompute: str, accumulation: int, vocab: int
) -> None:
    """SHARD_GRAD_OP, `reshard_after_forward: false`."""
    parallel = {"dp_shard": RANKS, "zero": 2}
    changes = {"method": "full", "recompute": recompute, "parallel": parallel}
    mine = rise(ledger(vocab, accumulation, version=2, **changes))
    cut = rise(ledger(vocab, accumulation, version=2, **changes | {"parallel": {"dp_shard": 2}}))
    with fake_world(WORLD, 0, "cpu", lambda _: None, lambda *_: None):
        again = False if recompute == "full" else None
        theirs = real_rise(vocab, accumulation=accumulation, reshards=False, reentrant=again)
    assert mine == pytest.approx(theirs, abs=SCALARS)
    assert mine > cut


@pytest.mark.parametrize(("lora", "reentrant"), [(False, True), (True, True), (True, False)])
def test_blocks_that_the_model_itself_recomputes(lora: bool, reentrant: bool) -> None:
    changes = OVER_BF16 if lora else {"method": "full"}
    options = {"fsdp_version": 2, "reentrant": reentrant}
    mine = rise(ledger(96, 2, version=2, **changes, recompute="full", options=options))
    with fake_world(WORLD, 0, "cpu", lambda _: None, lambda *_: None):
        theirs = real_rise(96, lora=lora, accumulation=2, reentrant=reentrant)
    assert mine == pytest.approx(theirs, abs=SCALARS)


@pytest.mark.parametrize(
    ("lora", "options"), [(False, {}), (True, {}), (True, {"adapter_dtype": "base"})]
)
def test_shards_and_states_are_of_what_is_trained_in_fp32(
    lora: bool, options: dict[str, str]
) -> None:
    """And of frozen weights as they were loaded: in 16 bits."""
    wide = {"lora": LORA["lora"] | {"rank": 64}}  # adapters of more than a block each
    changes = OVER_BF16 | wide if lora else {"method": "full"}
    mine = ledger(96, version=2, **changes, options={"fsdp_version": 2, **options})
    with fake_world(WORLD, 0, "cpu", lambda _: None, lambda *_: None):
        whole = make_model(96, lora=lora, dtype=torch.bfloat16, rank=64)
        model = prepare(whole.to(torch.bfloat16) if options else whole)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        shards = sum(block_size(p.to_local().nbytes) for p in model.parameters())
        kept = [t for state in optimizer.state.values() for t in state.values()]
        states = sum(block_size(getattr(t, "_local_tensor", t).nbytes) for t in kept)
    held = mine.by_kind(Phase.FORWARD)
    rotary = sum(e.nbytes for e in mine.at(Phase.FORWARD) if e.owner == "rotary")
    assert held[Kind.PARAMETERS] - rotary == shards
    assert held[Kind.OPTIMIZER_STATE] == states


def test_blocks_of_another_family() -> None:
    mine = rise(ledger(96, version=2, method="full", model=NEOX))
    with fake_world(WORLD, 0, "cpu", lambda _: None, lambda *_: None):
        model = prepare(make_neox())
        theirs = highest(model, lambda: local(model), waits(model), 1)
    assert mine == pytest.approx(theirs, abs=SCALARS)


def sizes_of(vocab: int) -> tuple[int, int, int]:
    """Elements of a block, of all that is outside, and of the whole model."""
    model = make_model(vocab)
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    every = sum(p.numel() for p in model.parameters())
    return block, every - len(model.model.layers) * block, every


def parts(found: Ledger, phase: Phase, owner: str) -> int:
    return sum(e.nbytes for e in found.at(phase) if e.owner == owner)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_pool_of_reduced_gradients_is_counted_once(version: int, accumulation: int) -> None:
    """Idle, or with the gradients in it: reserved as large in every phase but the first load."""
    found = ledger(768, accumulation, version=version, method="full", device="h100-sxm")
    block, _, every = sizes_of(768)
    own = 4 * every // RANKS
    gathered = 2 * 2 * block
    for phase in (Phase.FORWARD, Phase.LOSS):
        assert parts(found, phase, "streams") == gathered + own
    shards = parts(found, Phase.OPTIMIZER_STEP, "shards")
    assert own <= shards <= 1.01 * own  # and what blocks of 512 B round it to
    assert parts(found, Phase.OPTIMIZER_STEP, "streams") == gathered
    last = Phase.BACKWARD if accumulation == 1 else Phase.ACCUMULATE
    idle = parts(found, last, "streams") - gathered
    assert max(0, own - parts(found, last, "shards")) <= idle <= own
    assert not parts(found, Phase.LOAD, "streams")


def test_pools_of_gradients_that_go_to_the_host() -> None:
    """Version 2 leaves them to the next unit's; version 1 holds all until the backward is over."""
    block, outside, every = sizes_of(768)
    for version, own in ((2, max(block, outside)), (1, every)):
        away = ledger(
            768, version=version, method="full", device="h100-sxm", offload="parameters"
        )  # fmt: skip
        for phase in (Phase.FORWARD, Phase.OPTIMIZER_STEP):
            assert parts(away, phase, "streams") == 2 * 2 * block + 4 * own // RANKS


def test_what_products_loading_and_an_update_take_beside() -> None:
    block, outside, every = sizes_of(768)
    alone = ledger(768, version=2, ranks=1, method="full", device="h100-sxm")
    loop = {"name": "adamw", "implementation": "foreach"}
    for version, loading in ((1, 2 * 4 * max(block, outside)), (2, 4 * 768 * 64)):
        found = ledger(768, version=version, method="full", device="h100-sxm", optimizer=loop)
        assert found.by_kind(Phase.LOSS)[Kind.WORKSPACE] == alone.by_kind(Phase.LOSS)[
            Kind.WORKSPACE
        ]  # fmt: skip
        assert found.by_kind(Phase.LOAD)[Kind.TEMPORARY] == loading
        beside = found.by_kind(Phase.OPTIMIZER_STEP)[Kind.TEMPORARY]
        assert beside == pytest.approx(4 * every // RANKS, rel=0.02)  # roots of second moments


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit"])
def test_bitsandbytes_takes_no_weights_that_are_cut(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with fake_world(WORLD, 0, "cpu", lambda _: None, lambda *_: None):
        model = prepare(make_model(96))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters())
        with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor|sharding strategy"):
            optimizer.step()
    with pytest.raises(InvalidRequest, match="takes no weights that are cut"):
        ledger(
            96, version=2, method="full",
            optimizer={
                "name": "adamw8bit" if "8bit" in name else "adamw", "implementation": "fused",
            },
            options={"fsdp_version": 2, "paged": "Paged" in name},
        )  # fmt: skip


def test_tiles_are_as_large_as_trls() -> None:
    assert RECORDED["tile"] == [tiled.TOKENS, tiled.COLUMNS]


@pytest.mark.parametrize("case", UNITS, ids=str)
def test_a_head_that_trls_loss_never_runs(case: dict[str, Any]) -> None:
    """bench/trl_units.py ran TRL's loss from tiles over accelerate's units."""
    assert trl_units.predict(case) == pytest.approx(case["measured"], abs=MASKED)


@pytest.mark.parametrize(("lora", "accumulation"), [(False, 1), (False, 2), (True, 1)])
def test_a_device_holds_what_offloaded_shards_leave_there(
    monkeypatch: pytest.MonkeyPatch, lora: bool, accumulation: int
) -> None:
    """Of a device that is not here: on a CPU nothing tells it from the host."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import masking_utils

    with torch.device("meta"):
        whole = make_model(96, lora=lora)
    # it looks into the rows' positions, of which there is one sequence each
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    plugin = make_plugin(2, reshard_after_forward=True, cpu_offload=True)
    with fake_world(WORLD, 0, "cuda", lambda _: None, lambda *_: None):
        mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("shards",))
        axes = SimpleNamespace(fsdp_dim_names=("shards",))
        told = accelerator(plugin, "bf16", "cuda", torch_device_mesh=mesh, parallelism_config=axes)
        with fake_device(find_device("h100-sxm")) as mode:
            mode.allow_non_fake_inputs = True  # shards are cut on meta
            model = fsdp2_prepare_model(told, whole).to_empty(device="cpu")
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module.register_buffer(name, buffer.to("cuda"), persistent=False)
            theirs = highest(model, lambda: local(model), waits(model), accumulation, device="cuda")
    changes = OVER_BF16 if lora else {"method": "full"}
    mine = ledger(96, accumulation, version=2, offload="parameters", **changes)
    assert rise(mine) == pytest.approx(theirs, abs=100)  # the lengths of rows are on a GPU
    left = mine.by_kind(Phase.OPTIMIZER_STEP)
    assert left[Kind.PARAMETERS] == 64  # the rotary table
    assert not {Kind.OPTIMIZER_STATE, Kind.GRADIENTS} & left.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LORA | {"base_format": "int8"}, "`base_format: int8` under accelerate's FSDP2"),
        (LORA | {"base_format": "nf4"}, "leaves 4-bit weights whole or cuts them"),
        (
            OVER_BF16
            | {
                "framework": "trl",
                "offload": "parameters",
                "options": {"fsdp_version": 2, "version": "1.16"},
            },
            "reads the head's weight where it waits",
        ),
        ({"precision": "fp16-mixed"}, "`precision: fp16-mixed` under accelerate's FSDP2"),
    ],
)
def test_what_is_not_described_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ledger(768, version=2, **changes)
