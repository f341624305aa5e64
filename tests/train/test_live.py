"""Counted bytes against storages that exist, and the real step against the same step on fakes."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.certify.tracing.fake_device import kernels_strides
from memfit.records.ledger import Kind, Phase
from memfit.records.results import Tensor
from memfit.train.measure.live import Inside, LiveBytes
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from memfit.train.step.step import Batch, step
from tiny_models import (
    FAMILIES,
    MATH_ONLY,
    OWN_ATTENTION,
    PRECISIONS,
    VOCAB,
    make_batch,
    make_recipe,
)

DOCUMENTS = ((5, 11), (16,))
STEP_PHASES = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP]


@contextlib.contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def fake_tensors():
    """torch's own, whose strides are those of kernels."""
    with kernels_strides(), FakeTensorMode():
        yield


def watch(recipe, *, fake=False, documents=None) -> LiveBytes:
    """Load, a first step and a later one."""
    live = LiveBytes("cpu")
    with no_collection(), fake_tensors() if fake else contextlib.nullcontext():
        with live:
            model = build_model(recipe, "cpu")
            live.register_model(model)
        if not fake:
            fill_weights(model, recipe)
        optimizer = build_optimizer(recipe, model)
        built = Built(recipe, model, optimizer)
        shape = (recipe.micro_batch, recipe.sequence_length)
        batches = []
        for seed in range(recipe.accumulation):
            real = make_batch(*shape, seed=seed) if not fake else None
            ids = torch.empty(shape, dtype=torch.int64) if real is None else real.input_ids
            labels = torch.empty(shape, dtype=torch.int64) if real is None else real.labels
            batches.append(Batch(ids, labels, None, documents))
        with live:
            live.register_optimizer(optimizer)
            for batch in batches:
                live.register_batch(batch.input_ids, batch.labels)
            step(built, batches, 30, lambda _: live.enter(Phase.FIRST_STEP))
            step(built, batches, 30, live.enter)
    return live


def shape_of(ledger):
    return [(e.phase, e.kind, e.owner, e.nbytes) for e in ledger.entries]


# one of each kind of block; of all families the same is held in tests/certify/test_exactness.py
KINDS = ("gpt2", "bloom", "qwen3_moe")
EQUAL = [  # family, method, precision, base_format
    *(("llama", m, p, b) for m in ("full", "freeze", "lora") for p, b in PRECISIONS),
    *(
        pytest.param(family, *changes, marks=[] if family in KINDS else [pytest.mark.wide])
        for changes in (("full", "bf16-mixed", "fp32"), ("lora", "bf16", "bf16"))
        for family in FAMILIES[1:]
    ),
]


@pytest.mark.covering
@pytest.mark.parametrize(("family", "method", "precision", "base_format"), EQUAL)
def test_the_real_step_and_the_fake_step_are_the_same_events(
    family, method, precision, base_format
):
    own = family in OWN_ATTENTION
    recipe = make_recipe(
        family, method=method, precision=precision, base_format=base_format, accumulation=2,
        recompute_blocks=2,
        attention="math" if method == "full" or family in MATH_ONLY else "flash",
    )  # fmt: skip
    documents = None if own else DOCUMENTS
    real, fake = watch(recipe, documents=documents), watch(recipe, fake=True, documents=documents)
    assert [(s, n) for s, _, n in real.tape()] == [(s, n) for s, _, n in fake.tape()]
    assert real.peaks == fake.peaks
    assert shape_of(real.ledger()) == shape_of(fake.ledger())


@pytest.mark.parametrize("loss_chunk", [7, 32])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_the_chunked_loss_is_traced_to_the_byte(precision, loss_chunk):
    recipe = make_recipe(precision=precision, loss="chunked", loss_chunk=loss_chunk)
    real, fake = watch(recipe), watch(recipe, fake=True)
    assert [(s, n) for s, _, n in real.tape()] == [(s, n) for s, _, n in fake.tape()]


def test_live_bytes_are_those_of_the_storages_that_exist():
    live = LiveBytes("cpu")
    with live:
        a = torch.ones(1000)
        view = a[10:20]
        b = a * 2
        assert live.live == 8000
        del a
        assert live.live == 8000  # the view keeps the storage
        del view
        assert live.live == 4000
        b.resize_(2000)
        assert live.live == 8000
        b.add_(1)
        assert live.live == 8000
        parts = b.split(500)
        assert live.live == 8000
        del b, parts
        assert live.live == 0
    assert live.peak == 8000


def test_the_peak_counts_what_is_alive_within_one_expression():
    live = LiveBytes("cpu")
    with live:
        x = torch.ones(100)
        y = (x + 1) * (x + 2)
    assert live.peak == 4 * 400
    assert live.live == 800
    del x, y


def test_tensors_of_another_device_are_not_counted():
    live = LiveBytes("cuda")
    with live:
        kept = torch.ones(1000)
    assert live.peak == 0
    del kept


def test_a_phase_begins_with_what_is_alive():
    live = LiveBytes("cpu")
    with live:
        live.enter(Phase.FORWARD)
        kept = torch.ones(100)
        live.enter(Phase.BACKWARD)
        live.enter(Phase.OPTIMIZER_STEP)
        more = torch.ones(100)
        del more
    assert live.peaks[Phase.FORWARD] == 400
    assert live.peaks[Phase.BACKWARD] == 400
    assert live.peaks[Phase.OPTIMIZER_STEP] == 800
    del kept


def test_every_phase_has_its_peak_and_its_ledger_adds_up():
    live = watch(make_recipe(accumulation=2))
    ledger = live.ledger()
    assert list(live.peaks) == [Phase.LOAD, Phase.FIRST_STEP, *STEP_PHASES]
    assert {phase: ledger.total(phase) for phase in ledger.phases} == live.peaks
    assert live.peak == ledger.peak
    assert sum(t.nbytes for t in live.at_peak()) == live.peak
    assert isinstance(live.at_peak()[0], Tensor)


def test_persistent_kinds_are_the_bytes_that_the_model_and_optimizer_hold():
    recipe = make_recipe(accumulation=2)
    live = watch(recipe)
    model = build_model(recipe, "cpu")
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    counters = 4 * len(list(model.parameters()))
    kinds = live.ledger().by_kind(Phase.OPTIMIZER_STEP)
    assert kinds[Kind.PARAMETERS] == weights + buffers
    assert kinds[Kind.GRADIENTS] == weights
    assert kinds[Kind.OPTIMIZER_STATE] == 2 * weights + counters
    assert kinds[Kind.INPUT] == 2 * 2 * 2 * 16 * 8
    assert Kind.ACTIVATIONS not in kinds
    assert Kind.GRADIENTS not in live.ledger().by_kind(Phase.FORWARD)


def test_logits_are_recognised_by_their_last_dimension():
    live = watch(make_recipe())
    tokens = 2 * 16
    at_loss = live.ledger().by_kind(Phase.LOSS)
    assert at_loss[Kind.LOGITS] == 2 * tokens * VOCAB * 4  # logits and their log-softmax


def test_owners_are_the_components_of_the_model():
    ledger = watch(make_recipe()).ledger()
    by_owner = {e.owner: e.nbytes for e in ledger.at(Phase.LOAD) if e.kind is Kind.PARAMETERS}
    assert by_owner["embedding"] == VOCAB * 32 * 4
    assert by_owner["head"] == VOCAB * 32 * 4
    assert by_owner["norm"] == 32 * 4
    assert by_owner["rotary"] == 2 * 4 * 4
    assert set(by_owner) == {"embedding", "head", "norm", "rotary", "blocks"}
    state = {e.owner for e in ledger.entries if e.kind is Kind.OPTIMIZER_STATE}
    assert state == {"optimizer"}


class Outlives(nn.Module):
    """Keeps one of the two tensors that it makes."""

    def forward(self, x):
        lost = torch.empty(1000)
        kept = torch.empty(500)
        del lost
        return x * kept[0], kept


def test_what_outlives_its_module_is_an_activation_and_what_does_not_is_temporary():
    module, live = Outlives(), LiveBytes("cpu")
    live.register_model(module)
    with live:
        x = torch.ones(1)
        _, kept = module(x)
    kinds = {b.nbytes: live.kind_of(b) for b in live.blocks}
    assert kinds[4000] is Kind.TEMPORARY
    assert kinds[2000] is Kind.ACTIVATIONS
    del kept


def test_recomputed_activations_are_activations_of_the_backward():
    plain = watch(make_recipe()).ledger().by_kind(Phase.BACKWARD)
    recomputed = watch(make_recipe(recompute_blocks=3))
    activations = recomputed.ledger().by_kind(Phase.BACKWARD)[Kind.ACTIVATIONS]
    forward = recomputed.ledger().by_kind(Phase.FORWARD)[Kind.ACTIVATIONS]
    assert activations > 0
    assert forward < watch(make_recipe()).ledger().by_kind(Phase.FORWARD)[Kind.ACTIVATIONS]
    assert plain[Kind.ACTIVATIONS] > 0
    assert recomputed._frames == []  # recomputation stops early, by raising


def test_backward_allocations_name_the_module_they_belong_to():
    live = watch(make_recipe())
    places = {
        b.module for b in live.blocks if b.op == "mm.default" and live.kind_of(b) == "gradients"
    }
    assert "model.layers.1.mlp.down_proj.weight" in places
    temporary = {
        live._owners.find(b.module)
        for b in live.blocks
        if b.op == "mm.default" and live.kind_of(b) is Kind.TEMPORARY
    }
    assert temporary <= {"blocks", "head"}


def test_a_workspace_is_alive_while_its_operator_runs():
    product = torch.ops.aten.mm.default
    inside = Inside(after=(10_000,))
    live = LiveBytes("cpu", workspace=lambda f, args, kwargs: inside if f is product else None)
    with live:
        a = torch.ones(10, 10)
        b = a @ a
    assert live.peak == 400 + 10_000 + 400
    assert live.live == 800
    (workspace,) = (b for b in live.blocks if live.kind_of(b) is Kind.WORKSPACE)
    assert workspace.nbytes == 10_000
    del a, b


def test_restart_forgets_the_past_and_keeps_what_is_alive():
    live = LiveBytes("cpu")
    with live:
        kept = torch.ones(100)
        torch.ones(1000)
        live.restart()
        assert live.peak == 400
        more = torch.ones(10)
    assert live.peak == 440
    assert [n for _, _, n in live.tape()] == [400, 40]
    del kept, more


def test_watching_changes_no_number():
    recipe = make_recipe(recompute_blocks=2)
    batch = make_batch()

    def loss(watched):
        model = build_model(recipe, "cpu")
        fill_weights(model, recipe)
        built = Built(recipe, model, build_optimizer(recipe, model))
        with LiveBytes("cpu") if watched else contextlib.nullcontext():
            step(built, [batch], 30)
            return step(built, [batch], 30).loss

    assert torch.equal(loss(True), loss(False))
