"""One step against a textbook loop, and against itself cut, recomputed and packed differently."""

import itertools

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from memfit.adapters import find_adapter
from memfit.core.errors import InvalidRequest
from memfit.records.ledger import Phase
from memfit.train.measure.live import LiveBytes
from memfit.train.model.hugging_face import base_model, parts
from memfit.train.step.loss import loss_mean
from memfit.train.step.step import Batch, autocast, evaluate, step
from tiny_models import (
    ANY_KERNEL,
    CONFIGS,
    FAMILIES,
    PRECISIONS,
    RECURRENT,
    VOCAB,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
    textbook,
)


def one_step(recipe, *batches, enter=lambda phase: None):
    built = make_built(recipe)
    gradients = gradients_in(built)
    result = step(built, batches, targets_of(*batches), enter)
    return built, result, gradients


def assert_same_gradients(a, b, *, rtol):
    """Close relative to each tensor's largest element: some gradients are zero but for noise."""
    assert a.keys() == b.keys()
    largest = max(float(g.abs().max()) for g in b.values())
    for name in a:
        scale = max(float(b[name].abs().max()), 1e-3 * largest)
        error = float((a[name] - b[name]).abs().max())
        assert error <= rtol * scale, f"{name}: {error / scale:.1e}"


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((f, "math") for f in FAMILIES), *((f, "flash") for f in ANY_KERNEL)],
)
def test_loss_and_every_gradient_equal_a_textbook_loop(family, attention):
    recipe = make_recipe(family, attention=attention, optimizer={"clip_norm": 0.0})
    batch = make_batch(ignored=5)
    built = make_built(recipe)
    weights = {k: v.clone() for k, v in built.model.state_dict().items()}
    gradients = gradients_in(built)
    result = step(built, [batch], targets_of(batch))
    loss, expected = textbook(recipe, weights, batch)
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    assert result.grad_norm is None
    assert_same_gradients(gradients, expected, rtol=1e-5)


def test_the_update_is_the_textbook_update():
    recipe = make_recipe()
    batch = make_batch()
    built = make_built(recipe)
    model = base_model(built.model)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    step(built, [batch], targets_of(batch))
    _, gradients = textbook(recipe, weights, batch)
    twin = {name: nn.Parameter(weights[name].clone()) for name in gradients}
    for name, parameter in twin.items():
        parameter.grad = gradients[name]
    nn.utils.clip_grad_norm_(list(twin.values()), recipe.optimizer.clip_norm)
    torch.optim.AdamW(twin.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, twin[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("method", ["full", "freeze", "lora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputing_no_some_or_all_blocks_is_bitwise_equal(family, method, precision, base_format):
    results = []
    for blocks in (0, 2, 3):
        recipe = make_recipe(
            family, method=method, precision=precision, base_format=base_format,
            recompute_blocks=blocks,
        )  # fmt: skip
        documents = ((5, 11), (16,))
        batch = make_batch()
        batch = Batch(batch.input_ids, batch.labels, None, documents)
        _, result, gradients = one_step(recipe, batch)
        results.append((result, gradients))
    (first, expected), *others = results
    for result, gradients in others:
        assert torch.equal(result.loss, first.loss)
        assert torch.equal(result.grad_norm, first.grad_norm)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[n], expected[n]) for n in expected)


def test_recomputation_with_adapter_dropout_draws_the_same_numbers():
    lora = make_recipe(method="lora").lora
    results = []
    for blocks in (0, 3):
        recipe = make_recipe(
            method="lora", lora=replace(lora, dropout=0.5), recompute_blocks=blocks
        )
        built = make_built(recipe)
        with torch.no_grad():  # so that A has a gradient
            for name, parameter in built.model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        gradients = gradients_in(built)
        torch.manual_seed(7)
        step(built, [make_batch()], targets_of(make_batch()))
        results.append(gradients)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_how_a_global_batch_is_cut_does_not_change_the_gradient():
    """1x8 = 2x4 = 8x1 although the rows hold unequal numbers of targets."""
    whole = make_batch(rows=8)
    for row in range(8):
        whole.labels[row, : 2 * row] = -100
    results = []
    for rows in (8, 4, 1):
        batches = [
            Batch(whole.input_ids[i : i + rows], whole.labels[i : i + rows])
            for i in range(0, 8, rows)
        ]
        recipe = make_recipe(micro_batch=rows, accumulation=8 // rows)
        _, result, gradients = one_step(recipe, *batches)
        results.append((result, gradients))
    (first, expected), *others = results
    for result, gradients in others:
        torch.testing.assert_close(result.loss, first.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(result.grad_norm, first.grad_norm, rtol=1e-5, atol=0)
        assert_same_gradients(gradients, expected, rtol=1e-5)


PACKABLE = [
    *((f, a) for f in ANY_KERNEL if f not in RECURRENT for a in ("flash", "math")),
    ("gpt_oss", "math"),
]


def pack(lengths_of_rows, seed=0):
    """A packed batch and the same documents one by one."""
    alone, rows = [], []
    for i, lengths in enumerate(lengths_of_rows):
        documents = [make_batch(1, n, seed=seed + 10 * i + j) for j, n in enumerate(lengths)]
        alone += documents
        ids = torch.cat([d.input_ids for d in documents], 1)
        labels = torch.cat([d.labels for d in documents], 1)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        rows.append((ids, labels, positions))
    ids, labels, positions = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return Batch(ids, labels, positions, tuple(tuple(r) for r in lengths_of_rows)), alone


@pytest.mark.parametrize(("family", "attention"), PACKABLE)
def test_packed_documents_train_as_if_alone(family, attention):
    packed, alone = pack(((5, 9, 2), (16,)))
    recipe = make_recipe(family, attention=attention, packing=True)
    _, together, gradients = one_step(recipe, packed)
    _, apart, expected = one_step(recipe, *alone)
    torch.testing.assert_close(together.loss, apart.loss, rtol=1e-5, atol=0)
    assert_same_gradients(gradients, expected, rtol=1e-5)


def logits_of(built, batch):
    with torch.no_grad():
        places = parts(built.model)
        out = places.backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids,
            documents=batch.documents, use_cache=False,
        )  # fmt: skip
        return places.head(out.last_hidden_state)


def assert_unmoved(before, after, family):
    """Not by a bit; of experts, which multiply their tokens together, not by more than rounding."""
    slack = 1e-6 if "num_experts_per_tok" in CONFIGS[family] else 0.0
    torch.testing.assert_close(before, after, rtol=0, atol=slack)


@pytest.mark.parametrize(("family", "attention"), PACKABLE)
def test_nothing_leaks_between_documents(family, attention):
    """Other tokens in the first document change no bit of the second one's logits."""
    built = make_built(make_recipe(family, attention=attention, packing=True))
    packed, _ = pack(((7, 9),))
    changed = packed.input_ids.clone()
    changed[:, :7] = (changed[:, :7] + 1) % VOCAB
    before = logits_of(built, packed)
    after = logits_of(built, Batch(changed, packed.labels, packed.position_ids, packed.documents))
    assert_unmoved(before[:, 7:], after[:, 7:], family)
    assert not torch.equal(before[:, :7], after[:, :7])
    unpacked = logits_of(built, Batch(changed, packed.labels, packed.position_ids))
    assert not torch.equal(after[:, 7:], unpacked[:, 7:])  # without lengths it would leak


@pytest.mark.parametrize("family", FAMILIES)
def test_no_position_sees_a_later_one(family):
    built = make_built(make_recipe(family))
    batch = make_batch()
    changed = batch.input_ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % VOCAB
    before, after = logits_of(built, batch), logits_of(built, Batch(changed, batch.labels))
    assert_unmoved(before[:, :10], after[:, :10], family)


@pytest.mark.parametrize("chunk", [1, 5, 16, 32, 1000])
@pytest.mark.parametrize("method", ["full", "freeze", "lora"])
def test_chunked_loss_equals_plain_in_fp32(method, chunk):
    batch = make_batch(ignored=7)  # with chunks of 1 and 5, some hold no target at all
    _, plain, expected = one_step(make_recipe(method=method), batch)
    recipe = make_recipe(method=method, loss="chunked", loss_chunk=chunk)
    _, chunked, gradients = one_step(recipe, batch)
    torch.testing.assert_close(chunked.loss, plain.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients, expected, rtol=5e-6)


def head_gradients(precision, chunk, dtype):
    """Loss and gradients of hidden states and head, from inputs that bf16 holds exactly."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 100, 48).bfloat16().to(dtype).requires_grad_()
    head = nn.Linear(48, 301, bias=False)
    head.weight = nn.Parameter((0.2 * torch.randn(301, 48)).bfloat16().to(dtype))
    labels = torch.randint(0, 301, (2, 100))
    labels[0, :30] = -100
    loss = "chunked" if chunk else "plain"
    recipe = make_recipe(precision=precision, loss=loss, loss_chunk=chunk)
    targets = int((labels != -100).sum())
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast, cache_enabled=False):
        if dtype is torch.float64:
            logits = head(hidden).flatten(0, 1)
            value = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        else:
            value = loss_mean(head, hidden, labels, recipe, targets)
    value.backward()
    return [t.detach().double() for t in (value, hidden.grad, head.weight.grad)]


@pytest.mark.parametrize("chunk", [7, 64, 200])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("bf16-mixed", "float32")])
def test_chunked_loss_is_about_as_exact_as_plain_in_bf16(precision, dtype, chunk):
    exact = head_gradients("fp32", 0, torch.float64)
    plain, chunked = (head_gradients(precision, n, getattr(torch, dtype)) for n in (0, chunk))
    for true, a, b in zip(exact, plain, chunked, strict=True):
        assert (b - true).norm() <= 1.5 * (a - true).norm()


def test_chunked_loss_holds_no_more_logits_than_a_chunk():
    hidden = torch.randn(1, 64, 8, requires_grad=True)
    head = nn.Linear(8, 1000, bias=False)
    labels = torch.randint(0, 1000, (1, 64))
    recipe = make_recipe(loss="chunked", loss_chunk=16)
    live = LiveBytes("cpu")
    with live:
        loss_mean(head, hidden, labels, recipe, 64).backward()
    shown = {t.nbytes for t in live.at_peak()}
    logits = 16 * 1000 * 4
    assert logits in shown
    assert max(b.nbytes for b in live.blocks) == logits


def test_gradients_of_the_chunked_head_are_not_copied():
    """p.grad is the tensor that the forward made: a copy would be another vocab x hidden."""
    batch = make_batch(tokens=15)  # 30 logits rows are not as large as 32 columns of the head
    recipe = make_recipe(loss="chunked", loss_chunk=100)
    built = make_built(recipe)
    live = LiveBytes("cpu")
    live.register_model(built.model)
    with live:
        step(built, [batch], targets_of(batch), live.enter)
    of_head = [b for b in live.blocks if b.nbytes == VOCAB * 32 * 4 and b.op == "mm.default"]
    assert [b.kind for b in of_head] == ["gradients"]


@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("method", ["freeze", "lora"])
def test_frozen_weights_do_not_change(method, precision, base_format):
    recipe = make_recipe(method=method, precision=precision, base_format=base_format)
    built = make_built(recipe)
    before = {n: p.detach().clone() for n, p in built.model.named_parameters()}
    for seed in range(3):
        batch = make_batch(seed=seed)
        step(built, [batch], targets_of(batch))
    for name, parameter in built.model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_at_start_and_switched_off_is_the_base(family, precision, base_format):
    recipe = make_recipe(family, method="lora", precision=precision, base_format=base_format)
    built = make_built(recipe)
    batch, method = make_batch(), find_adapter(recipe)
    with autocast(built):
        with method.switched_off(built.model):
            base = logits_of(built, batch)
        assert torch.equal(logits_of(built, batch), base)
    step(built, [batch], targets_of(batch))
    with autocast(built):
        assert not torch.equal(logits_of(built, batch), base)
        with method.switched_off(built.model):
            assert torch.equal(logits_of(built, batch), base)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_starts_from_the_very_base_that_full_training_starts_from(family):
    batch = make_batch()
    full = logits_of(make_built(make_recipe(family)), batch)
    lora = logits_of(make_built(make_recipe(family, method="lora")), batch)
    assert torch.equal(full, lora)


def test_a_step_leaves_no_gradient_and_no_graph():
    built, result, _ = one_step(make_recipe(), make_batch())
    assert all(p.grad is None for p in built.model.parameters())
    assert result.loss.grad_fn is None
    assert (result.loss.dim(), result.loss.dtype) == (0, torch.float32)


def test_phases_are_entered_in_order_and_once_a_part():
    phases = []
    batches = [make_batch(seed=s) for s in range(3)]
    one_step(make_recipe(accumulation=3), *batches, enter=phases.append)
    assert [p for p, _ in itertools.groupby(phases)] == [
        Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP,
    ]  # fmt: skip
    phases.clear()
    one_step(make_recipe(), batches[0], enter=phases.append)
    assert Phase.ACCUMULATE not in phases


def test_evaluation_is_the_loss_and_changes_nothing():
    built = make_built(make_recipe(recompute_blocks=2))
    batch = make_batch(ignored=3)
    weights = {k: v.clone() for k, v in built.model.state_dict().items()}
    loss, targets = evaluate(built, batch)
    expected, _ = textbook(built.recipe, weights, batch)
    assert int(targets) == targets_of(batch)
    torch.testing.assert_close(loss / targets, expected, rtol=1e-5, atol=0)
    assert built.model.training
    assert all(torch.equal(v, weights[k]) for k, v in built.model.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_an_evaluation_in_chunks_is_the_plain_one_and_makes_no_gradient(precision):
    plain, chunked = (
        make_built(make_recipe(precision=precision, loss=loss, loss_chunk=chunk))
        for loss, chunk in (("plain", 0), ("chunked", 5))
    )
    batch = make_batch(ignored=3)
    with LiveBytes("cpu") as seen:
        loss, targets = evaluate(chunked, batch)
    expected, _ = evaluate(plain, batch)
    assert int(targets) == targets_of(batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5 if precision == "fp32" else 1e-2, atol=0)
    head = parts(chunked.model).head.weight
    assert not [
        b for b in seen.blocks if tuple(b.shape) == head.shape and b.op != "_to_copy.default"
    ]


def test_training_learns_a_batch_by_heart():
    built = make_built(make_recipe())
    batch = make_batch()
    losses = [float(step(built, [batch], targets_of(batch)).loss) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]


def test_a_global_batch_without_targets_is_refused():
    built = make_built(make_recipe())
    batch = make_batch()
    with pytest.raises(InvalidRequest, match="no target token"):
        step(built, [batch], 0)
    with pytest.raises(InvalidRequest, match="no micro-batch"):
        step(built, [], 5)


def test_mixed_precision_keeps_no_cast_of_a_weight_for_later():
    built = make_built(make_recipe(precision="bf16-mixed"))
    seen = []
    parts(built.model).blocks[0].register_forward_hook(
        lambda *_: seen.append(
            (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
        )
    )
    step(built, [make_batch()], 30)
    assert seen == [(True, False)]
