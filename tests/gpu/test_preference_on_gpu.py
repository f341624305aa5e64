"""Pairs on a real GPU, beside what a CPU computes and the certificate says; skipped without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from memfit import catalog  # noqa: E402
from memfit.certify.evidence.certificate import make_certificate  # noqa: E402
from memfit.core.errors import UnknownName  # noqa: E402
from memfit.records.recipe import Preference, Recipe  # noqa: E402
from memfit.train.measure.counters import measure  # noqa: E402
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights  # noqa: E402
from memfit.train.step.step import Batch, step  # noqa: E402
from tiny_models import VOCAB, make_recipe  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
REFERENCES = {"lora": "adapter-off", "full": "precomputed"}


def recipe_of(method: str, **changes: object) -> Recipe:
    preference = Preference(beta=0.1, reference=REFERENCES[method])
    return make_recipe(
        method=method, objective="dpo", preference=preference, loss="chunked", **changes
    )


def results(recipe: Recipe, device: str) -> tuple[float, list[float], list[float]]:
    """Loss, rewards and the sums of updated weights of one step on fixed pairs."""
    model = build_model(recipe, device)
    fill_weights(model, recipe)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    ids = torch.randint(0, VOCAB, (4, 16), generator=random)
    labels = ids.roll(-1, dims=1)
    labels[:, :4] = -100
    given = torch.full((4,), -50.0) if recipe.method == "full" else None
    batch = Batch(
        ids.to(device), labels.to(device),
        reference=None if given is None else given.to(device),
    )  # fmt: skip
    built = Built(recipe, model, build_optimizer(recipe, model))
    found = step(built, [batch], 2)
    sums = [float(p.detach().float().sum()) for p in model.parameters() if p.requires_grad]
    return float(found.loss), found.rewards.tolist(), sums


@pytest.mark.parametrize("method", REFERENCES)
def test_a_step_on_a_gpu_is_that_of_a_cpu(method: str) -> None:
    recipe = recipe_of(method, loss_chunk=12, micro_batch=4, attention="efficient")
    there = results(replace(recipe, attention="math"), "cpu")
    here = results(recipe, "cuda")
    assert here[0] == pytest.approx(there[0], rel=1e-4)
    assert here[1] == pytest.approx(there[1], rel=1e-3, abs=1e-3)
    assert here[2] == pytest.approx(there[2], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("method", REFERENCES)
def test_certified_memory_is_what_pairs_take(method: str) -> None:
    try:
        device = catalog.find_device(torch.cuda.get_device_name(0))
    except UnknownName as error:
        pytest.skip(f"no catalogue row for this GPU: {error.message}")
    base = {"base_format": "bf16"} if method == "lora" else {}
    recipe = recipe_of(
        method, config=CONFIG, precision="bf16", micro_batch=4, sequence_length=1024,
        loss_chunk=1024, device=device.id, **base,
    )  # fmt: skip
    certificate = make_certificate(recipe, device, None, None)
    measured = measure(recipe, device).measurements
    allocated = measured["memory.peak_allocated"].value
    assert allocated <= certificate.memory.peak_allocated
    assert allocated == pytest.approx(certificate.memory.peak_allocated, rel=0.005)
