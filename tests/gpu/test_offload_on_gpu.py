"""Activations on the host of a real GPU: the same numbers bit by bit, fewer bytes, and no race."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tiny_models import CONFIGS, gradients_in, make_batch, make_recipe, targets_of

torch = pytest.importorskip("torch")

from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights  # noqa: E402
from memfit.train.step.step import Batch, step  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
WIDE = CONFIGS["llama"] | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}


def one_step(recipe):
    model = build_model(recipe, "cuda")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    gradients = gradients_in(built)
    batch = make_batch(8, 64)
    moved = Batch(batch.input_ids.cuda(), batch.labels.cuda())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # gradients of other steps are among it
    loss = step(built, [moved], targets_of(batch)).loss
    return loss, gradients, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("recomputed", [0, 8])
def test_loss_and_gradients_are_those_without_and_the_device_holds_less(recomputed) -> None:
    kept = make_recipe(
        config=WIDE, precision="bf16", base_format="bf16", attention="math",
        recompute_blocks=recomputed,
    )  # fmt: skip
    loss, expected, held = one_step(kept)
    for _ in range(5):  # a race would not show every time
        again, gradients, fewer = one_step(replace(kept, offload="activations"))
        assert torch.equal(loss, again)
        assert all(torch.equal(expected[name], gradients[name]) for name in expected)
        assert fewer < held
