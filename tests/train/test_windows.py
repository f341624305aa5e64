"""Sliding windows and capped scores: the numbers of Hugging Face's own attention, and no others."""

import pytest
import torch
from test_step import assert_same_gradients, logits_of, one_step, pack

from gated_families import SLIDING
from memfit.train.model.attention import make_band
from memfit.train.step.step import Batch, evaluate, step
from tiny_models import (
    ANY_KERNEL,
    CONFIGS,
    VOCAB,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
    textbook,
)

CASES = [
    (family, kernel)
    for family in SLIDING
    for kernel in ("math", "flash")
    if kernel == "math" or family in ANY_KERNEL
]


def windowed(family, **changes):
    config = CONFIGS[family] | SLIDING[family]
    return make_recipe(family, config=config, optimizer={"clip_norm": 0.0}, **changes)


def test_a_band_is_what_its_words_say():
    band = make_band(5, 2, torch.float32, torch.device("cpu"))
    seen = torch.tensor([[abs(row - column) < 2 and column <= row for column in range(5)]
                         for row in range(5)])  # fmt: skip
    assert torch.equal(band == 0, seen)
    assert torch.equal(band == -torch.inf, ~seen)
    assert (band.shape, band.stride()) == ((5, 5), (16, 1))


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_loss_and_every_gradient_equal_a_textbook_loop(family, attention):
    recipe = windowed(family, attention=attention)
    batch = make_batch(ignored=5)
    built = make_built(recipe)
    weights = {k: v.clone() for k, v in built.model.state_dict().items()}
    gradients = gradients_in(built)
    result = step(built, [batch], targets_of(batch))
    loss, expected = textbook(recipe, weights, batch)
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    assert_same_gradients(gradients, expected, rtol=2e-5)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_packed_documents_train_as_if_alone(family, attention):
    packed, alone = pack(((5, 9, 2), (16,)))
    recipe = windowed(family, attention=attention, packing=True)
    _, together, gradients = one_step(recipe, packed)
    _, apart, expected = one_step(recipe, *alone)
    torch.testing.assert_close(together.loss, apart.loss, rtol=1e-5, atol=0)
    assert_same_gradients(gradients, expected, rtol=2e-5)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_recomputed_blocks_give_the_same_gradients(family, attention):
    batch = make_batch()
    _, plain, expected = one_step(windowed(family, attention=attention), batch)
    again = windowed(family, attention=attention, recompute_blocks=3)
    _, recomputed, gradients = one_step(again, batch)
    assert torch.equal(plain.loss, recomputed.loss)
    assert_same_gradients(gradients, expected, rtol=1e-6)


def test_a_window_hides_what_is_further_back():
    """Three blocks of a window of 3 see 6 tokens back, and not the seventh."""
    config = CONFIGS["mistral"] | {"sliding_window": 3}
    built = make_built(make_recipe("mistral", config=config))
    batch = make_batch()
    changed = batch.input_ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB

    def logits(ids):
        with torch.no_grad():
            return logits_of(built, Batch(ids, batch.labels))

    moved = (logits(batch.input_ids) != logits(changed)).any(-1).any(0)
    assert moved.nonzero().flatten().tolist() == list(range(4, 4 + 6 + 1))


@pytest.mark.parametrize("chunk", [5, 16, 1000])
@pytest.mark.parametrize(("family", "method"), [("gemma2", "full"), ("granite", "freeze")])
def test_bent_and_divided_logits_are_chunked_as_plain_ones(family, method, chunk):
    batch = make_batch(ignored=7)
    plain = make_recipe(family, method=method, optimizer={"clip_norm": 0.0})
    built, first, expected = one_step(plain, batch)
    chunked = make_recipe(
        family, method=method, optimizer={"clip_norm": 0.0}, loss="chunked", loss_chunk=chunk
    )
    other, second, gradients = one_step(chunked, batch)
    torch.testing.assert_close(first.loss, second.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients, expected, rtol=1e-5)
    for a, b in zip(evaluate(built, batch), evaluate(other, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0)
